"""`tree-rl bench --against verl`: whole updates by our engine against stock verl's as its example scripts configure it.

An update is what the trainer asks of a worker: log-probs and entropy of all rows, then forward, backward and optimizer.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.command import BenchOptions, batches_of
from tree_rl.benchmark.compare import GATE_TOKENS
from tree_rl.benchmark.figure import draw_speed_up
from tree_rl.benchmark.gate import GateError, Gradients
from tree_rl.benchmark.phases import OLD_LOG_PROBS, Stopwatch, UpdateTimes
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Spread, write_csv
from tree_rl.inspection.row import RowFileError
from tree_rl.inspection.text import format_table
from tree_rl.verl_plugin.bench.engines import (
    EXAMPLE,
    MAX_TOKENS,
    actor_loss,
    build_engine,
    flat_attention,
    save_random_model,
)
from tree_rl.verl_plugin.bench.flash_attention_4 import NAME as FLASH_ATTENTION_4
from tree_rl.verl_plugin.bench.flash_attention_4 import let_flash_attention_4_read_rows
from tree_rl.verl_plugin.bench.log_probs import log_probs_in_one_pass
from tree_rl.verl_plugin.bench.rows import rows_as_received, rows_to_update
from tree_rl.verl_plugin.options import TreeConfig

TREE, STOCK = "tree", "verl"
UPDATE, DENSE = "update", "qwen3"
HEADER = ("batch", "POR", "flat", "unique", "tree s", "verl s", "speed-up", "FLOP bound", "1/(1-POR)", "GiB tree/verl")
PRECISIONS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One engine."""

    engine: Any
    """Initialised."""
    max_tokens: int | None
    """Token budget of a micro-batch; None takes the script's, or the longest row where that is more."""

    def budget(self, batch: Batch) -> int:
        """Most tokens of a micro-batch of these rows: stock verl refuses a longer row."""
        return max(self.max_tokens or MAX_TOKENS, *(len(row) for row in batch.rows))


def run_stock_bench(options: BenchOptions, say: Callable[[str], None]) -> list[dict[str, object]]:
    """Run the benchmark.

    Args:
        options: of the command.
        say: prints a piece of text.

    Returns:
        The rows of the CSV.

    Raises:
        GateError: the engines' gradients differ.
        RowFileError: options or data that cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype_on(device)
    refuse_options(options, dtype)
    attention = flat_attention(options.packed_attention, device)
    if attention == FLASH_ATTENTION_4:
        let_flash_attention_4_read_rows()
    about = {
        "model": f"qwen3-{options.model}",
        "layers": str(options.size.shape.layers),
        "dtype": str(dtype).removeprefix("torch."),
        "against": f"verl, {EXAMPLE}",
        "tree_attention": options.tree_attention,
        "verl_attention": attention,
        "checkpointing": "every layer" if options.checkpointing else "none",
        "max_tokens": str(options.max_tokens or f"{MAX_TOKENS} or the longest row"),
        **provenance(commit=options.commit, packages=(*PACKAGES, "verl", "flash-attn")),
    }
    name = f"verl_{options.model}_{options.data_name}"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, log_probs_in_one_pass() as log_probs:
        about["verl_log_probs"] = log_probs
        say(", ".join(f"{name} {value}" for name, value in about.items() if value != ""))
        path = save_random_model(options.size, Path(folder), device)
        for row in _measured(options, path, dtype, attention):
            rows.append(row | about)
            if options.out is not None:
                # After every row: a run that is stopped leaves what it has measured.
                write_csv(options.out / f"{name}.csv", rows)
    say("\n" + format_table(HEADER, [_cells(row) for row in rows]))
    if options.out is not None:
        title = f"{about['model']}, {about['layers']} layers, {about['device']}"
        draw_speed_up(rows, options.out / f"{name}.png", title=title, over="stock verl")
        say(f"Written to {options.out / name}.csv and .png")
    return rows


def refuse_options(options: BenchOptions, dtype: torch.dtype) -> None:
    """Name what this comparison does not do.

    Raises:
        RowFileError: names the flag.
    """
    asked = {
        "--steps": options.steps > 0,
        "--project-all (stock verl projects every token)": options.project_all,
        "--trace": options.trace,
        f"--dtype {options.dtype}": dtype not in PRECISIONS,
        # Stock verl packs rows into one sequence, along which linear attention carries its state; experts near a tie
        # are chosen by rounding, and no gate could tell that from an error.
        f"--model {options.model} (no dense Qwen3)": options.size.family != DENSE,
    }
    for flag, is_asked in asked.items():
        if is_asked:
            raise RowFileError(f"--against verl: {flag} is not for this comparison; leave it out")


def _measured(options: BenchOptions, path: Path, dtype: torch.dtype, attention: str) -> Iterator[dict[str, object]]:
    batches = [batches_of(options, por, count=1)[0] for por in options.pors]
    thinned = [batch.thinned(max(1, sum(len(row) for row in batch.rows) // GATE_TOKENS)) for batch in batches]
    # The yardstick first, and away: three engines would not fit.
    exact = build_engine(path, tree=None, dtype=torch.float32, attention="sdpa", checkpointing=options.checkpointing)
    truths = [_gradients(Side(engine=exact, max_tokens=options.max_tokens), batch) for batch in thinned]
    del exact
    gc.collect()
    config = TreeConfig(max_tokens=options.max_tokens, attention=options.tree_attention, self_check=False)
    shared: dict[str, Any] = {"dtype": dtype, "attention": attention, "checkpointing": options.checkpointing}
    sides = {
        name: Side(engine=build_engine(path, tree=tree, **shared), max_tokens=options.max_tokens)
        for name, tree in ((TREE, config), (STOCK, None))
    }
    # All gates before the first update, which moves the weights.
    found = [check_engine_gradients(sides, small, truth) for small, truth in zip(thinned, truths, strict=True)]
    for batch, errors in zip(batches, found, strict=True):
        times: dict[str, list[UpdateTimes]] = {name: [] for name in sides}
        for repeat in range(options.repeats + 1):
            for name, side in sides.items():
                spent = update(side, batch)
                # The first update of each side compiles and warms up.
                if repeat:
                    times[name].append(spent)
        yield _row(batch, options, times, errors)


def check_engine_gradients(sides: dict[str, Side], batch: Batch, truth: list[torch.Tensor]) -> Gradients:
    """Compare the engines' gradients with those of stock verl in float32.

    Raises:
        GateError: the tree is further off than stock verl.
    """
    errors = {name: _relative_error(_gradients(side, batch), truth) for name, side in sides.items()}
    found = Gradients(tree=errors[TREE], packed=errors[STOCK])
    if not found.tree <= found.limit:
        raise GateError(
            f"gradient of the tree engine: expected a relative error of at most {found.limit:.3g}, received "
            f"{found.tree:.3g} (stock verl: {found.packed:.3g}); try another --tree-attention, and report it with the "
            "output of tree-rl doctor"
        )
    return found


def update(side: Side, batch: Batch) -> UpdateTimes:
    """One timed update of all rows: one optimizer step."""
    data = rows_as_received(batch, max_tokens=side.budget(batch))
    clock = Stopwatch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with clock.phase(OLD_LOG_PROBS), side.engine.eval_mode(disable_auto_offload=True):
        log_probs = side.engine.infer_batch(data)["model_output"]["log_probs"]
    with clock.phase(UPDATE), side.engine.train_mode(disable_auto_offload=True):
        side.engine.train_batch(rows_to_update(data, batch, log_probs), actor_loss())
    return clock.stop()


def _gradients(side: Side, batch: Batch) -> list[torch.Tensor]:
    """Gradients on the CPU, where they wait for the others."""
    data = rows_as_received(batch, max_tokens=side.budget(batch))
    with side.engine.eval_mode(disable_auto_offload=True):
        log_probs = side.engine.infer_batch(data)["model_output"]["log_probs"]
    side.engine.optimizer_zero_grad()
    with side.engine.train_mode(disable_auto_offload=True):
        side.engine.forward_backward_batch(rows_to_update(data, batch, log_probs), actor_loss())
        gradients = [parameter.grad.full_tensor().cpu() for parameter in side.engine.module.parameters()]
    side.engine.optimizer_zero_grad()
    return gradients


def _relative_error(got: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    difference = torch.stack([(g.to(t.dtype) - t).square().sum() for g, t in zip(got, truth, strict=True)]).sum()
    return float((difference / torch.stack([t.square().sum() for t in truth]).sum()).sqrt())


def _row(
    batch: Batch, options: BenchOptions, times: dict[str, list[UpdateTimes]], errors: Gradients
) -> dict[str, object]:
    """Columns of the CSV."""
    overlap, shape = batch.overlap(), options.size.shape
    seconds = {name: Spread.of([spent.seconds for spent in members]) for name, members in times.items()}
    ratios = [v.seconds / t.seconds for v, t in zip(times[STOCK], times[TREE], strict=True)]
    columns: dict[str, object] = {
        "batch": batch.name,
        "rows": len(batch.rows),
        "por": overlap.por,
        "flat_tokens": overlap.flat_tokens,
        "unique_tokens": overlap.unique_tokens,
        "speed_up": seconds[STOCK].median / seconds[TREE].median,
        "speed_up_low": min(ratios),
        "speed_up_high": max(ratios),
        "flop_bound": overlap.flop_bound(shape),
        "flop_bound_all_projected": replace(overlap, flat_head_tokens=overlap.flat_tokens).flop_bound(shape),
        "token_bound": overlap.token_bound,
    }
    for name, members in times.items():
        spread = seconds[name]
        columns |= {f"{name}_s": spread.median, f"{name}_s_low": spread.low, f"{name}_s_high": spread.high}
        for phase in (OLD_LOG_PROBS, UPDATE):
            columns[f"{name}_{phase}_s"] = Spread.of([spent.phases[phase] for spent in members]).median
        columns[f"{name}_peak_gib"] = max(spent.peak_bytes for spent in members) / 2**30
    return columns | {"tree_gradient_error": errors.tree, "verl_gradient_error": errors.packed}


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    def spread(name: str) -> str:
        return f"{row[f'{name}_s']:.3f} ({row[f'{name}_s_low']:.3f} to {row[f'{name}_s_high']:.3f})"

    return (
        str(row["batch"]),
        f"{row['por']:.3f}",
        f"{row['flat_tokens']:,}",
        f"{row['unique_tokens']:,}",
        spread(TREE),
        spread(STOCK),
        f"{row['speed_up']:.3f}x",
        f"{row['flop_bound']:.3f}x",
        f"{row['token_bound']:.3f}x",
        f"{row['tree_peak_gib']:.1f} / {row['verl_peak_gib']:.1f}",
    )
