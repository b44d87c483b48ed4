"""Other implementations of an expert layer beside Expertile: one environment and one process for each, the same rounds.

`inputs`, `adapters` and `worker` need nothing but torch and NumPy: they run in the peers' environments.
"""
