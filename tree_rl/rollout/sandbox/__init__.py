"""Where commands of agents run: confined directories here, or machines that SWE-ReX reaches."""
