"""verl's agent loops for the recording gateway and our environments."""
