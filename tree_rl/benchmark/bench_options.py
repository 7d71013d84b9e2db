"""What `tree-rl bench` is asked for: the rows, the model, and how to measure."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from tree_kernels.tree_attention.api import IMPLEMENTATIONS
from tree_rl.benchmark.batch import Batch, agent_batch, check_por, recorded_batches
from tree_rl.cost.model_sizes import MODEL_SIZES, ModelSize, full_name
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.row import Row
from tree_rl.models.fused_layers import why_not_liger

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_TOKENS = 262_144
"""Default budget of one forward. The whole batch of the paper's figure fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """The options of the command."""

    pors: tuple[float, ...]
    """Overlaps to draw, or to look for in the recording."""
    recording: list[Row] | None
    """Recorded rows; None draws agents."""
    rows_name: str
    """Part of the result files' names."""
    num_rows: int
    """Rows of a group."""
    row_tokens: int
    """Tokens of a row. A recording fills `num_groups * num_rows * row_tokens` flat tokens."""
    num_groups: int
    """Groups of a batch."""
    trained_share: float
    """Share of trained tokens in drawn rows."""
    model: str
    """Key of `MODEL_SIZES`; both sides train random weights of this size."""
    layers: int | None
    """Decoder layers; None keeps the model's."""
    precision: str | None
    """Key of `DTYPES`; None is bfloat16 on a GPU and float32 on a CPU."""
    checkpointing: bool
    """Recompute every layer in the backward."""
    liger: bool | None
    """Run Liger's fused layers; None runs them on a GPU where they are installed and fit the model."""
    max_tokens: int | None
    """Most tokens of one forward, on both sides; None takes the default of the comparison."""
    repeats: int
    """Timed updates of each side."""
    steps: int
    """Optimizer steps of the loss curves; 0 times updates instead."""
    learning_rate: float
    """Learning rate of the loss curves."""
    tree_attention: str
    """Implementation of `tree_kernels.tree_attention`."""
    packed_attention: str
    """Implementation of `packed_attention`; against verl, an attention of transformers."""
    trace: bool
    """Profile one update of each side."""
    out: Path | None
    """Folder of CSV and PNG; None writes nothing."""
    commit: str | None
    """Commit to write beside the figures; None asks the package."""

    def __post_init__(self) -> None:
        for flag, value, known in (("--model", self.model, MODEL_SIZES), ("--dtype", self.precision, DTYPES)):
            if value is not None and value not in known:
                raise InputError(f"{flag} {quoted(value)}: expected one of {', '.join(known)}")
        for por in self.pors:
            if self.recording is None:
                check_por(por, self.num_rows)
            elif not 0 <= por < 1:
                raise InputError(f"--por {por:g}: expected at least 0 and below 1")
        choices = ("auto", *IMPLEMENTATIONS)
        if self.tree_attention not in choices:
            raise InputError(f"--tree-attention {quoted(self.tree_attention)}: expected one of {', '.join(choices)}")
        if self.liger and (reason := self._why_not_liger()):
            raise InputError(f"--liger: {reason}; leave it out")

    @property
    def size(self) -> ModelSize:
        """Sizes of the model."""
        return MODEL_SIZES[self.model].with_layers(self.layers)

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU where there is none."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and activations."""
        return DTYPES[self.precision or ("bfloat16" if self.device.type == "cuda" else "float32")]

    @property
    def has_fused_layers(self) -> bool:
        """Whether both sides run Liger's layers."""
        if self.liger is not None:
            return self.liger
        return self.device.type == "cuda" and self._why_not_liger() is None

    def _why_not_liger(self) -> str | None:
        return why_not_liger(AutoConfig.for_model(**self.size.config), device=self.device)

    def batches(self, por: float, *, count: int) -> list[Batch]:
        """Up to `count` batches with about this overlap.

        Raises:
            InputError: the rows cannot overlap that much, every recorded group is too large, the model lacks
                tokens of the recording, or no token of a batch is trained.
        """
        batches = self._drawn(por, count) if self.recording is None else self._recorded(self.recording, por, count)
        if not all(batch.num_trained for batch in batches):
            raise InputError(
                "expected a trained token behind the first of a row in every batch, found none; raise --trained-share, "
                "take longer rows, or name others"
            )
        return batches

    def batch_of_each_por(self) -> list[tuple[float, Batch]]:
        """Each overlap with one of its `batches`; what a recording has nearest to several of them comes once."""
        found: dict[object, tuple[float, Batch]] = {}
        for por in self.pors:
            (batch,) = self.batches(por, count=1)
            found.setdefault(por if self.recording is None else frozenset(batch.groups), (por, batch))
        return list(found.values())

    def _drawn(self, por: float, count: int) -> list[Batch]:
        sizes = {"num_rows": self.num_rows, "row_tokens": self.row_tokens, "num_groups": self.num_groups}
        vocab = self.size.shape.vocab
        draw = partial(agent_batch, por=por, trained_share=self.trained_share, vocab=vocab, **sizes)
        return [draw(seed=seed) for seed in range(count)]

    def _recorded(self, rows: list[Row], por: float, count: int) -> list[Batch]:
        vocab = self.size.shape.vocab
        largest = max(int(row.token_ids.max()) for row in rows)
        if largest >= vocab:
            raise InputError(
                f"--model {self.model}: expected token ids below its vocabulary of {vocab}, "
                f"{self.rows_name} has {largest}; choose a model of that vocabulary (a small machine: --layers 1)"
            )
        flat_tokens = self.num_groups * self.num_rows * self.row_tokens
        max_tokens = self.max_tokens or MAX_TOKENS
        return recorded_batches(
            rows, name=self.rows_name, por=por, flat_tokens=flat_tokens, max_tokens=max_tokens, count=count
        )

    def setting(self) -> dict[str, str]:
        """Columns about the model that every comparison writes."""
        return {
            "model": full_name(self.model),
            "layers": str(self.size.shape.layers),
            "dtype": str(self.dtype).removeprefix("torch."),
            "checkpointing": "every layer" if self.checkpointing else "none",
            "layer_kernels": "liger" if self.has_fused_layers else "transformers",
        }

    def csv(self, kind: str) -> Path | None:
        """Where the results go, if anywhere."""
        return None if self.out is None else self.out / f"{kind}_{self.model}_{self.rows_name}.csv"
