"""Sizes of the Qwen3 models that benchmarks build with random weights; no torch here."""

from dataclasses import dataclass, replace

from tree_rl.tree.cost import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What a Qwen3Config needs to know."""

    shape: ModelShape
    """Sizes that decide the cost."""
    tied: bool
    """Whether head and embedding are one matrix, as published."""

    def with_layers(self, layers: int | None) -> "ModelSize":
        """The same model with another number of layers; None keeps it."""
        return self if layers is None else replace(self, shape=replace(self.shape, layers=layers))

    def config(self) -> dict[str, object]:
        """Keyword arguments of Qwen3Config."""
        return {
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "vocab_size": self.shape.vocab,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": self.tied,
        }


def _size(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelSize:
    shape = ModelShape(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocab=151_936,
    )
    return ModelSize(shape=shape, tied=tied)


TINY = ModelShape(hidden=64, layers=2, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512)

MODEL_SIZES = {
    "tiny": ModelSize(shape=TINY, tied=True),
    "0.6b": _size(1024, 3072, 28, 16, tied=True),
    "8b": _size(4096, 12288, 36, 32, tied=False),
    "32b": _size(5120, 25600, 64, 64, tied=False),
}
"""Qwen3 as published, and one of a few hundred thousand parameters that a CPU updates in a second."""
