"""How commands run on this machine: in front of them bubblewrap and limits, around a session its bounds."""
