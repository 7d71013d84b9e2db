"""What a forest's run does to need less GPU memory."""
