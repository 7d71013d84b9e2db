"""A rollout engine inside the job: Hugging Face models behind verl's LLM server interface, for runs without vLLM."""
