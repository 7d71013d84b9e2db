"""Where commands of agents run: a folder of this machine inside bubblewrap, or a container that SWE-ReX reaches."""
