"""Mixture-of-Experts routers on trees: recording and replaying routes, expert load, and merging rows by routes."""
