"""What a file of rows would gain from tree training: reading rows, overlap per group, causes of branching, packing.

It imports neither torch nor verl, so `tree-rl inspect` starts fast.
"""
