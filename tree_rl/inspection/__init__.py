"""What tree training would save on a file of rows: overlap per group, causes of branching, packing.

It imports neither torch nor verl, so `tree-rl inspect` starts fast.
"""
