"""Deep trunks on one GPU: what each plan of one update costs in seconds, device memory and host memory.

python benchmarks/deep_trunks.py --model 8b --liger --trunk 131072 --branches 2 --branch-tokens 8192 \
    --plans whole offloaded offloaded+tiled:8192 partitioned:65536
A plan is `whole` or `partitioned:TOKENS`, with `offloaded[:LAYERS]`, `tiled:TOKENS` and `relays_on_host` joined by +.
`budget:TOKENS` runs what a step chooses for `tree.max_tokens`, given all the host memory that it asks for.
"""

import argparse
import gc
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tree_rl.benchmark.against_packed.random_model import build_model
from tree_rl.benchmark.against_packed.update import clipped_loss
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.phases import Stopwatch, UpdateTimes
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import collect_rows
from tree_rl.cost.memory.choice import Chooser, quick_plan
from tree_rl.cost.memory.model import MemorySaving
from tree_rl.cost.model_sizes import MODEL_SIZES, ModelSize
from tree_rl.training import EdgeOutputs, Rows
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.loss.outputs import LOG_PROBS
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.partitioned import run_partitioned
from tree_rl.training.run import run_at_once, run_whole
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged, positions_of_rows

WARM_SHARE = 64
"""Kernels are compiled on a tree this many times smaller."""
MOST_RISE, MOST_ERROR, MOST_TIME = 0.02, 0.10, 1.05
"""Targets: a smaller budget's peak over a larger one's, predicted over measured peak, time over that of the first plan,
the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One way to run a forest."""

    name: str
    """Name as given on the command line."""
    capacity_tokens: int | None
    """C; None runs the forest whole."""
    saving: MemorySaving
    """What saves memory."""
    budget_tokens: int | None = None
    """Budget by which capacity and the ways to save memory are chosen; None: they are given."""
    predicted_bytes: float | None = None
    """Peak beside weights and gradients that the choice predicts."""

    @classmethod
    def parse(cls, name: str, layers: int) -> "Plan":
        """Read a plan of a model of so many layers.

        Raises:
            ValueError: an unknown word.
        """
        capacity: int | None = None
        budget: int | None = None
        saving: dict[str, Any] = {}
        for word in name.split("+"):
            kind, _, number = word.partition(":")
            if kind == "partitioned":
                capacity = int(number)
            elif kind == "budget":
                budget = int(number)
            elif kind == "offloaded":
                saving["offloaded_layers"] = int(number or layers)
            elif kind == "tiled":
                saving["tile_tokens"] = int(number)
            elif kind == "relays_on_host":
                saving["relays_on_host"] = True
            elif kind != "whole":
                raise ValueError(f"--plans {name}: expected whole, partitioned:TOKENS, offloaded, tiled:TOKENS, ...")
        return cls(name=name, capacity_tokens=capacity, saving=MemorySaving(**saving), budget_tokens=budget)

    def chosen(self, model: Any, tree: "Tree") -> "Plan":
        """This plan; with a budget, what a step of the model would choose for the tree."""
        if self.budget_tokens is None:
            return self
        parameter = next(model.parameters())
        memory = read_memory_model(model, dtype=parameter.dtype, device=parameter.device)
        assert memory is not None
        chooser = Chooser(model=memory)
        head_share = np.count_nonzero(tree.forest.rows_that_mark(tree.trained)) / tree.forest.num_unique
        choice = chooser.choose(tree.forest, self.budget_tokens, head_share=head_share)
        return replace(
            self,
            name=f"{self.name} ({choice.name})",
            capacity_tokens=None if choice.plan is None else choice.plan.capacity_tokens,
            saving=choice.saving,
            predicted_bytes=choice.peak.device,
        )

    def scaled(self, share: int) -> "Plan":
        """The same for a tree `share` times smaller; tiles stay as large as kernels like them."""
        capacity = None if self.capacity_tokens is None else max(1, self.capacity_tokens // share)
        return replace(self, capacity_tokens=capacity)


def trunk_batch(trunk: int, branches: int, branch_tokens: int, vocab: int) -> Batch:
    """Trained answers to one long prompt."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(1, vocab, trunk)
    advantage_B = draw.normal(size=branches)
    return Batch(
        name="trunk",
        rows=tuple(np.concatenate([prompt, draw.integers(1, vocab, branch_tokens)]) for _ in range(branches)),
        trained=(np.arange(trunk + branch_tokens) >= trunk,) * branches,
        groups=("trunk",) * branches,
        advantage_B=(advantage_B - advantage_B.mean()).astype(np.float32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A trunk with branches, their forest, and a loss as GRPO has it."""

    rows: Rows
    trained: Jagged
    forest: Forest
    old_F: torch.Tensor
    advantage_B: torch.Tensor

    @classmethod
    def draw(cls, trunk: int, branches: int, branch_tokens: int, *, vocab: int, device: torch.device) -> "Tree":
        """A trunk of context and branches that are trained."""
        batch = trunk_batch(trunk, branches, branch_tokens, vocab)
        old_F = np.random.default_rng(1).normal(-np.log(vocab), 0.2, sum(map(len, batch.rows)))
        return cls(
            rows=Rows.of(batch.rows, trained=batch.trained),
            trained=Jagged.from_rows(batch.trained),
            forest=batch.forest(),
            old_F=torch.tensor(old_F, dtype=torch.float32, device=device),
            advantage_B=torch.from_numpy(batch.advantage_B).to(device),
        )

    def loss(self, outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
        """PPO's clipped objective, averaged over trained tokens."""
        log_probs_f = outputs[LOG_PROBS].float()
        flat_f = positions_of_rows(self.rows.offsets, members)
        lengths_B = torch.from_numpy(np.diff(self.rows.offsets)[list(members)]).to(log_probs_f.device)
        wanted_f = torch.from_numpy(self.rows.wanted_F[flat_f]).to(log_probs_f.device)
        advantage_f = self.advantage_B[list(members)].repeat_interleave(lengths_B) * wanted_f
        return clipped_loss(log_probs_f, self.old_F[flat_f], advantage_f, int(self.rows.wanted_F.sum())), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One forward and backward."""

    times: UpdateTimes
    loss: float
    partitions: int
    base_bytes: int
    reserved_bytes: int


def step(model: Any, tree: Tree, plan: Plan) -> Measured:
    """Forward and backward of the whole tree; gradients lie where they lay."""
    context = StepContext.of(model)
    on_gpu = context.device.type == "cuda"
    forest = tree.forest
    cut = None if plan.capacity_tokens is None else quick_plan(forest, plan.capacity_tokens)
    batch = replace(MicroBatch.of(tree.rows, range(tree.rows.num_rows), forest), plan=cut, saving=plan.saving)
    call = StepCall(rows=tree.rows, loss=tree.loss, trains=True, is_separable=True)
    _zero_gradients(model)
    if on_gpu:
        torch.cuda.empty_cache()
    base_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    clock = Stopwatch(context.device)
    if cut is None:
        result = run_at_once(run_whole(context, call, batch, None))
    else:
        result = run_at_once(run_partitioned(context, call, batch, None, known_f=None))
    return Measured(
        times=clock.stop(),
        loss=result.loss,
        partitions=batch.num_partitions,
        base_bytes=base_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else 0,
    )


def _zero_gradients(model: Any) -> None:
    """Weights' gradients exist before a run, so that every plan's peak contains them."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def pin(plan: Plan, tree: Tree, size: ModelSize, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds to take the plan's host memory beforehand: a training run pays them once."""
    cut = None if plan.capacity_tokens is None else quick_plan(tree.forest, plan.capacity_tokens)
    tokens = tree.forest.num_unique if cut is None else cut.peak_live_tokens
    wanted = plan.saving.offloaded_layers * tokens * size.shape.hidden * dtype.itemsize
    started = time.perf_counter()
    host_slab(device).reserve(None, wanted)
    return time.perf_counter() - started


def measured(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row per plan."""
    size = MODEL_SIZES[args.model].with_layers(args.layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(size, device=device, dtype=dtype, liger=args.liger)
    sizes = (args.trunk, args.branches, args.branch_tokens)
    tree = Tree.draw(*sizes, vocab=size.shape.vocab, device=device)
    small = [max(2, number // WARM_SHARE) for number in (args.trunk, args.branch_tokens)]
    warm = Tree.draw(small[0], args.branches, small[1], vocab=size.shape.vocab, device=device)
    operations = size.shape.cost.forest(tree.forest, tree.trained)
    first: tuple[float, float] | None = None
    for plan in [Plan.parse(name, size.shape.layers).chosen(model, tree) for name in args.plans]:
        row: dict[str, Any] = {"plan": plan.name, "unique": tree.forest.num_unique, "flat": tree.forest.num_flat}
        try:
            row["pin_s"] = round(pin(plan, tree, size, dtype, device), 2)
            step(model, warm, plan.scaled(WARM_SHARE))
            runs = [step(model, tree, plan) for _ in range(args.repeats)]
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            row |= {"failed": type(error).__name__}
        else:
            last, seconds = runs[-1], min(one.times.seconds for one in runs)
            norm = float(sum(float(p.grad.float().square().sum()) for p in model.parameters()) ** 0.5)
            first = first or (last.loss, norm)
            row |= {
                "failed": "",
                "partitions": last.partitions,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(tree.forest.num_unique / seconds, 1),
                "tflops": round(operations / seconds / 1e12, 2),
                "base_gib": round(last.base_bytes / 2**30, 2),
                "predicted_gib": None if plan.predicted_bytes is None else round(plan.predicted_bytes / 2**30, 6),
                "peak_gib": round(max(one.times.peak_bytes for one in runs) / 2**30, 2),
                "reserved_gib": round(max(one.reserved_bytes for one in runs) / 2**30, 2),
                "loss": last.loss,
                "gradient_norm": norm,
                "loss_deviation": abs(last.loss - first[0]),
                "gradient_norm_deviation": abs(norm / first[1] - 1) if first[1] else 0.0,
            }
        # Behind the handler: the frames of a failed run are gone, and what they held.
        gc.collect()
        row["host_gib"] = round(host_slab(device).num_bytes / 2**30, 2)
        row["host_peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(row, flush=True)
        yield row


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The runs of one tree against the targets."""
    ran = [row for row in rows if not row["failed"]]
    lines = [f"{row['plan']}: {row['failed']}" for row in rows if row["failed"]]
    first = rows[0]
    for row in ran[1:]:
        if first["plan"] == "whole" and not first["failed"]:
            share = float(row["seconds"]) / float(first["seconds"])
            line = f"{row['plan']}: {float(row['peak_gib']):.1f} GiB (whole: {float(first['peak_gib']):.1f})"
            lines.append(f"{line}, {share:.3f} of the whole run's time, {_reached(share <= MOST_TIME)}")
    # A CPU has no peak.
    budgets = [row for row in ran if row["plan"].startswith("budget:") and float(row["peak_gib"])]
    budgets.sort(key=lambda row: -int(row["plan"].split()[0].partition(":")[2]))
    peaks = [float(row["peak_gib"]) for row in budgets]
    if budgets:
        rise = max((peak / min(peaks[:index]) - 1 for index, peak in enumerate(peaks) if index), default=0.0)
        line = f"{len(budgets)} budgets, largest rise of the peak {max(rise, 0.0):.3f}"
        lines.append(f"{line}, {_reached(rise <= MOST_RISE)}")
        # Predictions leave out weights and gradients.
        pairs = [(float(row["predicted_gib"]), float(row["peak_gib"]) - float(row["base_gib"])) for row in budgets]
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
        lines.append(f"predicted over measured peak off by {max(errors):.3f}, {_reached(max(errors) <= MOST_ERROR)}")
    return "\n".join(lines)


def _reached(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main() -> None:
    """Run the plans one after the other and write their CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODEL_SIZES), default="8b")
    parser.add_argument("--layers", type=int, default=None, help="decoder layers; default: the model's")
    parser.add_argument("--trunk", type=int, default=131_072, help="tokens of the shared prompt")
    parser.add_argument("--branches", type=int, default=2)
    parser.add_argument("--branch-tokens", type=int, default=8_192, help="tokens of an answer")
    parser.add_argument("--plans", nargs="+", default=["whole", "offloaded", "offloaded+tiled:8192"])
    parser.add_argument("--liger", action="store_true", help="Liger's fused layers")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder of the CSV; none is written without it")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    size = MODEL_SIZES[args.model].with_layers(args.layers)
    about = {
        "model": args.model,
        "layers": size.shape.layers,
        "trunk": args.trunk,
        "branches": args.branches,
        "branch_tokens": args.branch_tokens,
        "layer_kernels": "liger" if args.liger else "transformers",
        **provenance(commit=args.commit),
    }
    name = f"deep_trunks_{args.model}_{size.shape.layers}_{args.trunk}_{args.branches}x{args.branch_tokens}.csv"
    rows = measured(args, device)
    print(verdict(collect_rows(rows, about, None if args.out is None else args.out / name)))


if __name__ == "__main__":
    main()
