"""What a sandbox behind SWE-ReX does by scripts of its own."""
