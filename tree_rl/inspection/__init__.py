"""What a file of rows would gain from tree training: reading rows, overlap per group, causes of branching, packing.

Needs tree_rl.tree alone, so that `tree-rl inspect` starts without torch and verl.
"""
