"""Lets verl 0.9.1 hand LoRA adapters to vLLM 0.29 and later, which gave a function another name.

verl's loader of adapters asks for a `get_unstacked_mapper`. vLLM's own loader takes `get_rename_mapper` in its place.
"""

from vllm.model_executor.models.utils import WeightsMapper

if not hasattr(WeightsMapper, "get_unstacked_mapper") and hasattr(WeightsMapper, "get_rename_mapper"):
    WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
