"""A stand-in for sgl-kernel without kernels; see pyproject.toml."""
