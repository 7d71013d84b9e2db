"""Trees of rows as one page for a browser: to token scale, coloured by what the rows say, with their text.

It imports neither torch nor verl. The page loads nothing from a network.
"""
