"""Checks of an installation and of a cluster, before GPUs are taken."""
