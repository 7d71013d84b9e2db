"""Mixture-of-Experts routers during a step: routes of a forest, and the load of experts over all rows of an update."""
