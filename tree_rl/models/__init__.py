"""How a Hugging Face model reads a tree: attention through transformers' registry, and what is refused."""

from tree_rl.models.attention import attention_name, use_tree_attention
from tree_rl.models.support import UnsupportedModelError, check_model

__all__ = ["UnsupportedModelError", "attention_name", "check_model", "use_tree_attention"]
