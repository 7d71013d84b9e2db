"""Worlds to act in: sandboxes on this machine or elsewhere, and software tasks that tests reward."""
