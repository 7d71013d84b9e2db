"""Agents that ask a recorded model over HTTP and work in an environment. One file each."""
