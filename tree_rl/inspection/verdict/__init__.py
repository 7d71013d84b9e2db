"""What trees would save on the rows of a file: time of an update and of a whole step, memory, money."""
