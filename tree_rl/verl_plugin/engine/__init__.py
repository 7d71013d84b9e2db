"""The FSDP2 engine over trees: rows in, forests planned and run in lock-step, verl's outputs back."""
