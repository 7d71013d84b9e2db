"""A rollout engine on a Hugging Face model inside verl (`rollout.name=hf`), for machines without vLLM and SGLang."""
