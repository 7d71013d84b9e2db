"""The FSDP2 engine on trees: reads verl's rows, runs them as forests, and returns verl's outputs."""
