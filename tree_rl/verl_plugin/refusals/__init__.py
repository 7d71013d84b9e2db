"""One table of everything that a tree run refuses, which launcher, trainer and engine check."""
