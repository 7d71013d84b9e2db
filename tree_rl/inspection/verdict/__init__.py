"""What trees would save on the rows of a file: of an update, of a whole step, of memory and money."""
