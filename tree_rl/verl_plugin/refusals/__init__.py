"""What a tree run refuses, in one table: launcher, trainer and engine look up the rows about what they hold."""
