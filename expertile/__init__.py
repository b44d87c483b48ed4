"""placeholder until the door is written"""
