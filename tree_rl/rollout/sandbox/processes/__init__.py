"""Runs commands on this machine: bubblewrap and limits for each command, and limits for a session as a whole."""
