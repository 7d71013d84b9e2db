"""verl and vLLM on machines without a GPU."""
