"""`tree-rl view`: the trees of a file of rows as a page."""
