"""Mixture-of-Experts routers on trees: record and replay of routes, load, and where routes keep rows apart."""
