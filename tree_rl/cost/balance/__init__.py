"""Decides which rank trains which rows of a mini-batch. A group stays on one rank unless splitting it is faster."""
