"""Memory that a forest needs, and the cheapest way to run it within a budget."""
