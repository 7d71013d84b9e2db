"""Shows the trees of rows as one page for a browser: to token scale, coloured by recorded values, with their text.

It imports neither torch nor verl. The page loads nothing from a network.
"""
