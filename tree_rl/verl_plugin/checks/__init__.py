"""Checks of an installation and of a cluster, before a job uses GPUs."""
