"""What a kernel computes: gather, gate/up, down, finish; gates and weight formats, one file each."""
