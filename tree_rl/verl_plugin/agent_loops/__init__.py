"""verl's agent loops over our environments and over the recording gateway."""
