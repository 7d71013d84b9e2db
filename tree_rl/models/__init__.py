"""Prepares Hugging Face models for trees: attention, recurrent layers, the head, and which models are refused."""

from tree_rl.extras import require_modules

require_modules(__name__, "torch", "transformers")

from tree_rl.models.attention import use_tree_attention
from tree_rl.models.edge_head import use_edge_head
from tree_rl.models.support import UnsupportedModelError, check_model

__all__ = ["UnsupportedModelError", "check_model", "use_edge_head", "use_tree_attention"]
