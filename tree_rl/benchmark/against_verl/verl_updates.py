"""`tree-rl bench --against verl`: whole updates by our engine and by stock verl's, as its example script sets it up.

An update is what the trainer asks of a worker: log-probs and entropy of all rows, then forward, backward and optimizer.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.benchmark.against_verl import engines
from tree_rl.benchmark.against_verl import without_flash_attention_2 as without
from tree_rl.benchmark.against_verl.worker_rows import rows_as_received, rows_to_update
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.bench_options import BenchOptions
from tree_rl.benchmark.comparison import TREE, Comparison, format_comparisons, time_in_turns
from tree_rl.benchmark.figure import draw_speed_up
from tree_rl.benchmark.gradient_errors import GradientErrors, relative_error
from tree_rl.benchmark.phases import OLD_LOG_PROBS, UPDATE, Stopwatch, UpdateTimes
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Columns, collect_rows, print_setting
from tree_rl.inspection.files import InputError
from tree_rl.verl_plugin.compat import FSDPEngineWithLMHead
from tree_rl.verl_plugin.options import TreeConfig

STOCK, DENSE = "verl", "qwen3"
PRECISIONS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One engine."""

    engine: FSDPEngineWithLMHead
    """Initialised."""
    max_tokens: int | None
    """Token budget of a micro-batch; None takes the script's, or the longest row where that is more."""

    def budget(self, batch: Batch) -> int:
        """Most tokens of a micro-batch of these rows: stock verl refuses a longer row."""
        return max(self.max_tokens or engines.MAX_TOKENS, *(len(row) for row in batch.rows))


def run_against_verl(options: BenchOptions, say: Callable[[str], None]) -> list[Columns]:
    """Run the benchmark, report to `say`, and return the rows of the CSV; raises an InputError or a GateError."""
    refuse_options(options)
    attention = engines.flat_attention(options.packed_attention, options.device)
    if attention == without.NAME:
        without.let_flash_attention_4_read_rows()
    about = {
        **options.setting(),
        "against": f"verl, {engines.EXAMPLE}",
        "tree_attention": options.tree_attention,
        "verl_attention": attention,
        "max_tokens": str(options.max_tokens or f"{engines.MAX_TOKENS} or the longest row"),
        **provenance(commit=options.commit, packages=(*PACKAGES, "verl", "flash-attn")),
    }
    path = options.csv("verl")
    with tempfile.TemporaryDirectory() as folder, without.log_probs_in_one_pass() as log_probs:
        about["verl_log_probs"] = log_probs
        print_setting(about, say)
        model = engines.save_random_model(options.size, Path(folder), options.device)
        rows = collect_rows(_measured(options, model, attention), about, path)
    say(format_comparisons(rows, STOCK))
    if path is not None:
        draw_speed_up(rows, path.with_suffix(".png"), over="stock verl")
        say(f"Written to {path} and .png")
    return rows


def refuse_options(options: BenchOptions) -> None:
    """Raise an InputError that names the first option for which this comparison has no meaning."""
    asked = {
        "--steps": options.steps > 0,
        "--trace": options.trace,
        f"--dtype {options.precision}": options.dtype not in PRECISIONS,
        # Stock verl carries the state of linear attention from row to row, and rounding chooses experts near a tie.
        # The gate could tell neither from an error.
        f"--model {options.model} (no dense Qwen3)": options.size.config["model_type"] != DENSE,
    }
    for flag, is_asked in asked.items():
        if is_asked:
            raise InputError(f"--against verl: {flag} is not for this comparison; leave it out")


def _measured(options: BenchOptions, path: Path, attention: str) -> Iterator[Columns]:
    batches = [batch for _, batch in options.batch_of_each_por()]
    thinned = [batch.for_gate() for batch in batches]
    shape, checkpointing = options.size.shape, options.checkpointing
    # The yardstick is measured first and deleted: three engines would not fit.
    exact = engines.build_engine(path, tree=None, dtype=torch.float32, attention="sdpa", checkpointing=checkpointing)
    truths = [gradients_of(Side(engine=exact, max_tokens=options.max_tokens), batch) for batch in thinned]
    del exact
    gc.collect()
    config = TreeConfig(max_tokens=options.max_tokens, attention=options.tree_attention, self_check=False)
    settings: dict[str, Any] = {"dtype": options.dtype, "attention": attention, "checkpointing": checkpointing}
    settings["liger"] = options.has_fused_layers
    sides = {
        name: Side(engine=engines.build_engine(path, tree=tree, **settings), max_tokens=options.max_tokens)
        for name, tree in ((TREE, config), (STOCK, None))
    }
    # All gates come before the first update, which moves the weights.
    found = [check_engine_gradients(sides, small, truth) for small, truth in zip(thinned, truths, strict=True)]
    for batch, errors in zip(batches, found, strict=True):
        updates = {name: partial(update, side, batch) for name, side in sides.items()}
        # The first update of each side compiles and warms up.
        times = {name: spent[1:] for name, spent in time_in_turns(updates, repeats=options.repeats + 1).items()}
        columns, overlap = Comparison(batch=batch, errors=errors, times=times).columns(shape), batch.overlap()
        # Stock verl projects every token to the vocabulary.
        projected = replace(overlap, flat_head_tokens=overlap.flat_tokens)
        yield columns | {"flop_bound_all_projected": shape.flop_bound(projected)}


def check_engine_gradients(sides: Mapping[str, Side], batch: Batch, truth: list[torch.Tensor]) -> GradientErrors:
    """Compare gradients with the truth, stock verl's in float32; a GateError if the tree is further off than verl."""
    errors = {name: relative_error(gradients_of(side, batch), truth) for name, side in sides.items()}
    return GradientErrors(tree=errors[TREE], rows=errors[STOCK]).require_exact("stock verl")


def update(side: Side, *batches: Batch, then: Callable[[], None] = lambda: None) -> UpdateTimes:
    """One timed update: log-probs of all rows, then an optimizer step for each batch and a call of `then`."""
    received = [rows_as_received(batch, max_tokens=side.budget(batch)) for batch in batches]
    clock = Stopwatch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with clock.phase(OLD_LOG_PROBS):
        log_probs = [_log_probs(side, data) for data in received]
    for batch, data, old in zip(batches, received, log_probs, strict=True):
        with clock.phase(UPDATE), side.engine.train_mode(disable_auto_offload=True):
            side.engine.train_batch(rows_to_update(data, batch, old), engines.actor_loss())
        then()
    return clock.stop()


def gradients_of(side: Side, batch: Batch) -> list[torch.Tensor]:
    """Gradients of all parameters, on the CPU, where they wait for those of the other side."""
    data = rows_as_received(batch, max_tokens=side.budget(batch))
    data = rows_to_update(data, batch, _log_probs(side, data))
    side.engine.optimizer_zero_grad()
    with side.engine.train_mode(disable_auto_offload=True):
        side.engine.forward_backward_batch(data, engines.actor_loss())
        gradients = [parameter.grad.full_tensor().cpu() for parameter in side.engine.module.parameters()]
    side.engine.optimizer_zero_grad()
    return gradients


def _log_probs(side: Side, data: TensorDict) -> Any:
    with side.engine.eval_mode(disable_auto_offload=True):
        return side.engine.infer_batch(data)["model_output"]["log_probs"]
