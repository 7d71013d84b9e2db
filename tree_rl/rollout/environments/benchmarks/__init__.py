"""Published benchmarks by name: converts their rows to tasks and judges by each benchmark's rule."""
