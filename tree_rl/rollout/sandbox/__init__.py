"""Sandboxes for agents' commands: a folder of this machine inside bubblewrap, or a container that SWE-ReX reaches."""
