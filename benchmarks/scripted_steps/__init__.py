"""Steps of main_ppo whose sessions follow a recorded script, so that two ways to train do the same work."""
