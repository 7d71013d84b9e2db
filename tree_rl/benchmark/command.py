"""What `tree-rl bench` does: build, gate, measure, print, write CSV and PNG."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tree_kernels
from tree_rl.benchmark import packed_attention, packed_linear_attention
from tree_rl.benchmark.batch import Batch, agent_batch, recorded_batches
from tree_rl.benchmark.compare import PACKED, TREE, Comparison, compare
from tree_rl.benchmark.deviation import deviation_curves
from tree_rl.benchmark.figure import draw_deviation, draw_speed_up
from tree_rl.benchmark.model_sizes import MODEL_SIZES, ModelSize
from tree_rl.benchmark.models import build_model, build_optimizer, delta_rule_implementation
from tree_rl.benchmark.phases import PHASES
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv
from tree_rl.benchmark.trace import trace
from tree_rl.benchmark.update import Planner, packed_planner, tree_planner, update
from tree_rl.inspection.row import Row, RowFileError
from tree_rl.inspection.text import format_table

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_TOKENS = 262_144
"""Of one forward, unless asked for: room for the whole batch of the paper's figure."""
LEARNING_RATE = 1e-6
CURVE_LEARNING_RATE = 1e-4
"""Of curves unless asked for: far above a fine-tuning's, so that deviations show."""
CURVE_BATCHES = 4
HEADER = ("batch", "POR", "flat", "unique", "tree s", "packed s", "speed-up", "FLOP bound", "of bound", "1/(1-POR)")
HEADER_PHASES = ("side", *PHASES, "host plan", "peak GiB")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """The options of the command."""

    model: str
    """Key of `MODEL_SIZES`."""
    layers: int | None
    """Decoder layers; None keeps the model's."""
    pors: tuple[float, ...]
    """Overlaps to build, or to look for in the data."""
    data: list[Row] | None
    """A recording; None draws synthetic agents."""
    data_name: str
    """Its name."""
    num_rows: int
    """Rows of a group."""
    row_tokens: int
    """Tokens of a row; with data, times `num_rows` and `num_groups` the flat tokens to reach."""
    num_groups: int
    """Groups of the batch."""
    trained_share: float
    """Share of tokens with a loss in synthetic rows."""
    max_tokens: int | None
    """Most tokens of one forward, for both sides; None leaves it to what is compared."""
    repeats: int
    """Timed updates of each side."""
    steps: int
    """Optimizer steps of the deviation curves; 0 times updates instead."""
    tree_attention: str
    """Implementation of `tree_kernels.tree_attention`."""
    packed_attention: str
    """Implementation of `tree_rl.benchmark.packed_attention`."""
    project_all: bool
    """Packed rows project every token, not only trained ones."""
    checkpointing: bool
    """Recompute layers in the backward, on both sides."""
    trace: bool
    """Profile one update of each side."""
    out: Path | None
    """Folder of CSV and PNG; None writes nothing."""
    commit: str | None
    """Commit to write beside figures; None asks git."""
    learning_rate: float = CURVE_LEARNING_RATE
    """Of AdamW in the deviation curves."""
    dtype: str | None = None
    """Key of `DTYPES`; None is bfloat16 on a GPU, float32 on a CPU."""

    def __post_init__(self) -> None:
        for flag, value, choices in (("--model", self.model, MODEL_SIZES), ("--dtype", self.dtype, DTYPES)):
            if value is not None and value not in choices:
                raise RowFileError(f"{flag} {value}: expected one of {', '.join(choices)}")

    @property
    def size(self) -> ModelSize:
        """The model that is built."""
        return MODEL_SIZES[self.model].with_layers(self.layers)

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Of parameters and activations."""
        return DTYPES[self.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def run_bench(options: BenchOptions, say: Callable[[str], None]) -> list[dict[str, object]]:
    """Run the benchmark.

    Args:
        options: of the command.
        say: prints a piece of text.

    Returns:
        The rows of the CSV.

    Raises:
        GateError: tree and packed rows differ.
        RowFileError: options or data that cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, size = options.dtype_on(device), options.size
    max_tokens = options.max_tokens or MAX_TOKENS
    about = _setting(options, size, device, dtype) | provenance(commit=options.commit)
    say(", ".join(f"{name} {value}" for name, value in about.items() if value != ""))
    model = build_model(
        size,
        device=device,
        dtype=dtype,
        tree_impl=options.tree_attention,
        packed_impl=options.packed_attention,
        checkpointing=options.checkpointing,
    )
    planners = {
        TREE: tree_planner(max_tokens, device),
        PACKED: packed_planner(max_tokens, device, project_all=options.project_all),
    }
    run = _run_curves if options.steps else _run_times
    name = f"{'deviation' if options.steps else 'update'}_{options.model}_{options.data_name}"
    rows: list[dict[str, object]] = []
    for row in run(options, size, model, planners, say):
        rows.append(row | about)
        if options.out is not None:
            # After every row: a run that is stopped leaves what it has measured.
            write_csv(options.out / f"{name}.csv", rows)
    say((_curves_text if options.steps else _times_text)(rows))
    if options.out is not None:
        title = f"{about['model']}, {about['layers']} layers, {about['device']}"
        draw = draw_deviation if options.steps else draw_speed_up
        draw(rows, options.out / f"{name}.png", title=title)
        say(f"Written to {options.out / name}.csv and .png")
    return rows


def _run_times(
    options: BenchOptions, size: ModelSize, model: Any, planners: dict[str, Planner], say: Callable[[str], None]
) -> Iterator[dict[str, object]]:
    optimizer = build_optimizer(model, lr=LEARNING_RATE)
    for number, por in enumerate(options.pors):
        (batch,) = batches_of(options, por, count=1)

        def trace_side(side: str, batch: Batch = batch) -> None:
            report = trace(model, lambda: update(model, optimizer, batch, planners[side]))
            say(f"{side}: {report.text()}")

        comparison = compare(
            model,
            optimizer,
            batch,
            planners,
            repeats=options.repeats,
            project_all=options.project_all,
            # Synthetic rows have the same lengths at every overlap: packed rows are warm after the first batch.
            warm_up=(TREE, PACKED) if number == 0 or options.data is not None else (TREE,),
            after_warm_up=trace_side if options.trace else None,
        )
        row = comparison.row(size.shape)
        say(_text(comparison, row))
        yield row


def _run_curves(
    options: BenchOptions, size: ModelSize, model: Any, planners: dict[str, Planner], say: Callable[[str], None]
) -> Iterator[dict[str, object]]:
    # A recording is seen once where it is long enough; synthetic tokens can only be learnt by heart.
    count = CURVE_BATCHES if options.data is None else options.steps
    batches = batches_of(options, options.pors[0], count=count)
    yield from deviation_curves(model, batches, planners, steps=options.steps, lr=options.learning_rate)


def _times_text(rows: list[dict[str, object]]) -> str:
    return "\n" + format_table(HEADER, [_cells(row) for row in rows])


def _curves_text(rows: list[dict[str, object]]) -> str:
    """First, middle and last step, and the largest deviations."""
    names = [name for name in rows[0] if name.startswith(("loss_", "gradient_"))]
    shown = [rows[step] for step in sorted({0, len(rows) // 2, len(rows) - 1})]
    lines = [(str(row["step"]), *(f"{row[name]:.3g}" for name in names)) for row in shown]
    deviations = [name for name in names if "_to_" in name]
    largest = [f"largest {name}: {max(float(str(row[name])) for row in rows):.3g}" for name in deviations]
    return "\n".join([format_table(("step", *names), lines), *largest])


def batches_of(options: BenchOptions, por: float, *, count: int) -> list[Batch]:
    """Batches of about that overlap: of the recording, or synthetic agents.

    Raises:
        RowFileError: so much overlap is not possible, no group of the recording is small enough, or the model lacks
            tokens of the recording.
    """
    if options.data is not None:
        largest = max(int(row.token_ids.max()) for row in options.data)
        if largest >= options.size.shape.vocab:
            raise RowFileError(
                f"--model {options.model}: expected token ids below its vocabulary of {options.size.shape.vocab}, "
                f"{options.data_name} has {largest}; choose a model of that vocabulary (a small machine: --layers 1)"
            )
        return recorded_batches(
            options.data,
            name=options.data_name,
            por=por,
            flat_tokens=options.num_groups * options.num_rows * options.row_tokens,
            max_tokens=options.max_tokens or MAX_TOKENS,
            count=count,
        )
    return [
        agent_batch(
            por=por,
            num_rows=options.num_rows,
            row_tokens=options.row_tokens,
            num_groups=options.num_groups,
            trained_share=options.trained_share,
            vocab=options.size.shape.vocab,
            seed=seed,
        )
        for seed in range(count)
    ]


def _setting(options: BenchOptions, size: ModelSize, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Columns that say what ran; "auto" is written as what it chose."""
    tree, packed = options.tree_attention, options.packed_attention
    if tree == "auto":
        tree = tree_kernels.chosen_implementation(device=device, dtype=dtype, head_size=size.shape.head_dim)
        tree = "fa4, triton for tiny segments" if tree == "fa4" else tree
    if packed == "auto":
        packed = packed_attention.chosen_implementation(device, dtype, size.shape.head_dim)
    return {
        "model": options.model if "qwen" in options.model else f"qwen3-{options.model}",
        "layers": str(size.shape.layers),
        "dtype": str(dtype).removeprefix("torch."),
        "tree_attention": tree,
        "packed_attention": packed,
        **_linear_attention(size, device, dtype),
        "packed_head": "all tokens" if options.project_all else "trained tokens",
        "checkpointing": "every layer" if options.checkpointing else "none",
        "max_tokens": str(options.max_tokens or MAX_TOKENS),
        "learning_rate": f"{options.learning_rate if options.steps else LEARNING_RATE:g}",
    }


def _linear_attention(size: ModelSize, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What both sides run in Gated DeltaNet layers; empty without such layers."""
    state = size.more.get("linear_key_head_dim")
    tree = "" if state is None else delta_rule_implementation(size, device, dtype)
    packed = "" if state is None else packed_linear_attention.chosen_implementation(device, dtype, state)
    return {"tree_linear_attention": tree, "packed_linear_attention": packed}


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    def times(side: str) -> str:
        return f"{row[f'{side}_s']:.3f} ({row[f'{side}_s_low']:.3f} to {row[f'{side}_s_high']:.3f})"

    return (
        str(row["batch"]),
        f"{row['por']:.3f}",
        f"{row['flat_tokens']:,}",
        f"{row['unique_tokens']:,}",
        times(TREE),
        times(PACKED),
        f"{row['speed_up']:.3f}x",
        f"{row['flop_bound']:.3f}x",
        f"{row['of_flop_bound']:.3f}",
        f"{row['token_bound']:.3f}x",
    )


def _text(comparison: Comparison, row: dict[str, object]) -> str:
    """The gate and the phases of one batch."""
    lines = []
    for side in comparison.times:
        phases = [f"{row[f'{side}_{name}_s']:.3f}" for name in PHASES]
        lines.append((side, *phases, f"{row[f'{side}_host_plan_s']:.3f}", f"{row[f'{side}_peak_gib']:.1f}"))
    gate = comparison.gradients
    return (
        f"\n{row['batch']}, POR {row['por']:.3f}: gradient error {gate.tree:.2e} (packed rows {gate.packed:.2e}), "
        f"{row['of_flop_bound']:.3f} of the FLOP bound, {row['passes_of_flop_bound']:.3f} without the optimizer\n"
        + format_table(HEADER_PHASES, lines)
    )
