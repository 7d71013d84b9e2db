"""Adapters that verl's FSDP engine cannot shard, refused by name; without trees such runs end in PyTorch's words.

verl 0.9.1 gives an untied embedding and an untied head FSDP groups of their own, inside of which an adapter has none.
"""

from typing import Any

from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

from tree_rl.verl_plugin.engine.features import refuse_first


def refuse_adapters(module: Any, key: str = "model") -> None:
    """Check adapters on the embedding and the head of a built model; other layers take any.

    Args:
        module: the innermost model, adapters attached.
        key: where the role's model stands in the config, for messages.

    Raises:
        UnsupportedFeatureError: names the model, the adapter and the remedy.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = bool(getattr(module.config, "tie_word_embeddings", False))
    name = f"in {module.config.model_type} (tie_word_embeddings={tied}), which verl's FSDP engine cannot shard"
    leave_out = f"set {key}.exclude_modules='.*(embed_tokens|lm_head)', or load an adapter without it"
    refuse_first(
        (not tied and isinstance(embedding, LoraLayer), f"LoRA on the embedding {name}; {leave_out}"),
        (not tied and isinstance(head, LoraLayer), f"LoRA on the head {name}; {leave_out}"),
        (
            not tied and isinstance(embedding, ModulesToSaveWrapper),
            f"modules_to_save with the embedding {name}; load an adapter that names only the head there",
        ),
        (
            tied and isinstance(embedding, TrainableTokensWrapper),
            f"trainable_token_indices {name}; load an adapter without them, such as one with embed_tokens among "
            "target_modules",
        ),
        (
            tied
            and not all(
                weight.is_contiguous() for part in (embedding, head) if part is not None for weight in part.parameters()
            ),
            f"ensure_weight_tying of LoRA {name}; load an adapter without it",
        ),
    )
