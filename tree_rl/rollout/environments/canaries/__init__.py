"""What is planted among a task's own tests, so that code under test cannot make all of them pass."""
