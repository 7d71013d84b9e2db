"""Weak scaling of a whole update through verl's FSDP2 and the tree engine: 1, 2, 4 GPUs at equal work per GPU.

    for gpus in 1 2 4 1 2 4; do
        torchrun --nproc-per-node $gpus benchmarks/scaling_gpus.py --model 0.6b 8b --out scaling.csv \\
            --data examples/tau_bench_airline/trajectories.json --tokenizer outputs/qwen_tokenizer
    done
    python benchmarks/scaling_gpus.py --report scaling.csv

A step is what the trainer asks of a worker: old log-probs, then forward, backward and optimizer. Every rank gets
the same trees with other token ids (`equal`), or all trees are shared out as by the trainer (`balanced`) or in random
order (`drawn`); the mean work per GPU is the same in all of them and on one GPU.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

from tree_rl.benchmark.against_packed.profiled_update import covered_seconds, is_on_device, span_of
from tree_rl.benchmark.against_verl.engines import BFLOAT16, FLOAT32, save_random_model
from tree_rl.benchmark.against_verl.verl_updates import Side, update
from tree_rl.benchmark.batch import Batch, agent_batch, recorded_batch
from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.benchmark.phases import OLD_LOG_PROBS, UPDATE, UpdateTimes
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import read_csv, write_csv
from tree_rl.inspection.report import rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file
from tree_rl.tree import Forest, ModelShape
from tree_rl.tree.balance.batch import lay_out_groups, measure_groups
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig

GRPO, RECORDED = "grpo", "recorded"
EQUAL, BALANCED, DRAWN = "equal", "balanced", "drawn"
POR, TRAINED, ROWS = 0.5, 0.3, 8
"""Of the synthetic GRPO trees: overlap, trained share, rows of a prompt."""
TARGET = 0.92
KERNELS = 30
"""Lines of the profile."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank trains."""

    batch: Batch
    unique_tokens: int
    imbalance: float
    """Work of the busiest rank over the mean of all."""
    operations: float
    """Of its forward and backward, by the cost model."""


def build_engine(path: Path, *, attention: str, forward_prefetch: bool, sharing: int = 1) -> Any:
    """The tree engine under verl's FSDP2, sharded over all ranks, `sharing` of which share tokens."""
    tree = TreeConfig(mode="tree", attention=attention, self_check=False)
    engine = TreeFSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(path),
            load_tokenizer=False,
            use_remove_padding=True,
            enable_gradient_checkpointing=True,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=TreeFSDPEngineConfig(
            mixed_precision=BFLOAT16 if DEVICE == "cuda" else FLOAT32,
            use_torch_compile=False,
            forward_prefetch=forward_prefetch,
            ulysses_sequence_parallel_size=sharing,
            tree=tree,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def drawn_trees(tokens: int, row_tokens: int, vocab: int) -> Batch:
    """GRPO trees of about `tokens` unique tokens in all; the rows of one tree are shorter where it would have more."""
    row_tokens = min(row_tokens, round(tokens / (ROWS * (1 - POR))))
    prompts = max(1, round(tokens / (ROWS * row_tokens * (1 - POR))))
    return agent_batch(
        por=POR, num_rows=ROWS, row_tokens=row_tokens, num_groups=prompts, trained_share=TRAINED, vocab=vocab
    )


def recorded_trees(rows: list[Row], tokens: int, vocab: int) -> Batch:
    """Whole trees of a recording in random order, of at most `tokens` unique tokens in all."""
    groups = list(rows_by_group(row.group for row in rows).values())
    chosen: list[int] = []
    left = tokens
    for index in np.random.default_rng(0).permutation(len(groups)):
        size = Forest.from_rows([rows[row].token_ids for row in groups[index]]).num_unique
        if size <= left:
            left -= size
            chosen += groups[index]
    if not chosen or any(rows[row].trained is None for row in chosen):
        raise SystemExit(f"--data: expected rows with a mask and a tree of at most {tokens} tokens; raise --tokens")
    batch = recorded_batch([rows[row] for row in chosen], name=RECORDED)
    return replace(batch, rows=tuple(row % vocab for row in batch.rows))


def share_of(one: Batch, arm: str, *, rank: int, world: int, shape: ModelShape) -> Share:
    """This rank's rows of `world` copies of the trees, each with other token ids."""
    rows = [(row + 1009 * copy) % shape.vocab for copy in range(world) for row in one.rows]
    names = [f"{copy} {group}" for copy in range(world) for group in one.groups]
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    group_of_row = np.array([number[name] for name in names])
    overlaps = measure_groups(group_of_row, rows, shape.cost)
    costs = np.array([overlap.cost for overlap in overlaps])
    rank_of_row = np.zeros(len(rows), dtype=np.int64)
    if arm == BALANCED:
        paths = [overlap.paths for overlap in overlaps]
        layout = lay_out_groups(group_of_row, paths, num_ranks=world, num_cells=1)
        for member, slots in enumerate(layout.order.reshape(world, -1)):
            rank_of_row[slots[slots < layout.num_rows]] = member
        loads = layout.load_DC[:, 0]
    else:
        places = np.arange(len(costs)) if arm == EQUAL else np.random.default_rng(1).permutation(len(costs))
        rank_of_group = places * world // len(costs)
        rank_of_row = rank_of_group[group_of_row]
        loads = np.bincount(rank_of_group, weights=costs, minlength=world)
    mine = np.flatnonzero(rank_of_row == rank)
    size = len(one.rows)
    batch = Batch(
        name=one.name,
        rows=tuple(rows[index] for index in mine),
        trained=tuple(one.trained[index % size] for index in mine),
        groups=tuple(names[index] for index in mine),
        advantage_B=one.advantage_B[mine % size],
    )
    forest = batch.forest()
    return Share(
        batch=batch,
        unique_tokens=forest.num_unique,
        imbalance=float(loads.max() / loads.mean()),
        operations=shape.cost.forest(forest, Jagged.from_rows(batch.trained)),
    )


def synchronized() -> None:
    """All ranks at the same point, their devices idle."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()


def worst(value: float) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor)


def timed_steps(side: Side, batch: Batch, steps: int) -> tuple[list[float], list[UpdateTimes]]:
    """Seconds of each step on the slowest rank, and this rank's times; one more step before warms up."""
    seconds, times = [], []
    for index in range(steps + 1):
        synchronized()
        spent = update(side, batch)
        slowest = worst(spent.seconds)
        if index:
            seconds.append(slowest)
            times.append(spent)
    return seconds, times


def describe_step(step: Callable[[], object]) -> str:
    """Profile one step of this rank: what runs, how long it idles, and what of NCCL nothing else covers."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
        synchronized()
    on_device = [event for event in profiler.events() or () if is_on_device(event)]
    spans: dict[str, list[tuple[float, float]]] = {"everything": [], "computing": [], "NCCL": []}
    for event in on_device:
        # Ranges that were named on the host are no kernels.
        if event.is_user_annotation:
            continue
        span = span_of(event)
        spans["everything"].append(span)
        spans["NCCL" if "nccl" in event.name.lower() else "computing"].append(span)
    seconds = {name: covered_seconds(found) for name, found in spans.items()}
    length = max((end for _, end in spans["everything"]), default=0.0) - min(spans["everything"], default=(0.0,))[0]
    head = (
        f"device {length:.4f} s, idle {length - seconds['everything']:.4f} s; computing {seconds['computing']:.4f} s; "
        f"NCCL {seconds['NCCL']:.4f} s, alone {seconds['everything'] - seconds['computing']:.4f} s\n"
    )
    key = f"self_{DEVICE}_time_total" if DEVICE == "cpu" else "self_device_time_total"
    return head + str(profiler.key_averages().table(sort_by=key, row_limit=KERNELS, max_name_column_width=60))


def measure(args: argparse.Namespace, model: str, rank: int, world: int) -> None:
    """All shapes and arms of one model on this number of GPUs; a CSV row after each."""
    size = MODEL_SIZES[model].with_layers(args.layers if model == "8b" else None)
    path = args.scratch / f"scaling_qwen3_{model}_{size.shape.layers}"
    if rank == 0 and not (path / "config.json").exists():
        save_random_model(size, path, torch.device(DEVICE), torch.bfloat16)
        torch.cuda.empty_cache()
    torch.distributed.barrier()
    engine = build_engine(path, attention=args.attention, forward_prefetch=args.forward_prefetch, sharing=args.sp)
    side = Side(engine=engine, max_tokens=args.max_tokens)
    about = {
        "model": f"qwen3-{model}",
        "layers": size.shape.layers,
        "gpus": world,
        "sharing": args.sp,
        "max_tokens": args.max_tokens,
        "attention": engine.attention_implementation,
        "forward_prefetch": args.forward_prefetch,
        **provenance(commit=args.commit, packages=(*PACKAGES, "verl")),
    }
    place = {"rank": rank // args.sp, "world": world // args.sp, "shape": size.shape}
    for shape, tokens in itertools.product(args.shapes, args.tokens):
        if shape == GRPO:
            one = drawn_trees(tokens, args.row_tokens, size.shape.vocab)
        else:
            one = recorded_trees(read_row_file(args.data, tokenizer=args.tokenizer), tokens, size.shape.vocab)
        for arm in args.arms if world > 1 else [EQUAL]:
            row = measure_arm(side, share_of(one, arm, **place), args.steps)
            if rank == 0:
                row = {"shape": shape, "arm": arm, "trees_per_gpu": len(set(one.groups))} | row
                print(f"{model} {world} GPUs", row, flush=True)
                write_csv(args.out, [*read_csv(args.out), row | about])
        if args.profile is not None and (shape, tokens) == (args.shapes[0], args.tokens[0]):
            batch = share_of(one, EQUAL, **place).batch
            text = describe_step(partial(update, side, batch))
            if rank == 0:
                args.profile.mkdir(parents=True, exist_ok=True)
                (args.profile / f"profile_{model}_{shape}_{world}gpu.txt").write_text(text)


def measure_arm(side: Side, share: Share, steps: int) -> dict[str, object]:
    """Columns of the CSV: seconds of the slowest rank; phases are those of rank 0."""
    seconds, times = timed_steps(side, share.batch, steps)
    tokens = torch.tensor([share.unique_tokens], device=DEVICE)
    torch.distributed.all_reduce(tokens)
    return {
        "unique_tokens_per_rank": int(tokens) // torch.distributed.get_world_size(),
        "operations": worst(share.operations),
        "unique_tokens_most": int(worst(share.unique_tokens)),
        "imbalance": share.imbalance,
        "step_s": statistics.median(seconds),
        "old_log_probs_s": statistics.median(spent.phases[OLD_LOG_PROBS] for spent in times),
        "update_s": statistics.median(spent.phases[UPDATE] for spent in times),
        "steps_s": " ".join(f"{value:.5f}" for value in seconds),
        "cost_error": side.engine.step.calls.error,
        "dummy_ops_rank0": side.engine.step.dummy_ops,
        "peak_gib": worst(max(spent.peak_bytes for spent in times)) / 2**30,
    }


def report(rows: Sequence[dict[str, str]]) -> str:
    """t(1) / t(n) of medians over all runs; in brackets between the extremes of single steps."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        arm = row["arm"] + (" with forward_prefetch" if row["forward_prefetch"] == "True" else "")
        key = (row["model"], row["layers"], row["shape"], arm, row["gpus"])
        seconds.setdefault(key, []).extend(map(float, row["steps_s"].split()))
    lines = []
    for (model, layers, shape, arm, gpus), here in seconds.items():
        alone = seconds.get((model, layers, shape, EQUAL, "1"))
        line = f"{model} {layers} layers, {shape}, {arm}, {gpus} GPUs: {statistics.median(here):.4f} s"
        line += f" ({min(here):.4f} to {max(here):.4f}, {len(here)} steps)"
        if gpus != "1" and alone:
            ratio = statistics.median(alone) / statistics.median(here)
            line += f", t(1)/t(n) {ratio:.3f} ({min(alone) / max(here):.3f} to {max(alone) / min(here):.3f})"
            line += "" if arm != EQUAL else f", target {TARGET}: {'met' if ratio >= TARGET else 'missed'}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure as one rank of torchrun, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="print the ratios of a CSV file and stop")
    parser.add_argument("--model", nargs="+", choices=("tiny", "0.6b", "8b"), default=["0.6b"])
    parser.add_argument("--layers", type=int, default=4, help="of 8b")
    parser.add_argument("--shapes", nargs="+", choices=(RECORDED, GRPO), default=[RECORDED, GRPO])
    parser.add_argument("--arms", nargs="+", choices=(EQUAL, BALANCED, DRAWN), default=[EQUAL, BALANCED, DRAWN])
    parser.add_argument("--data", type=Path, help="recorded rows, as for tree-rl bench")
    parser.add_argument("--tokenizer", type=Path, help="for recorded messages")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536], help="unique tokens per GPU and step")
    parser.add_argument("--row-tokens", type=int, default=8_192, help="of synthetic rows")
    parser.add_argument("--max-tokens", type=int, default=98_304, help="unique tokens of one forward")
    parser.add_argument("--sp", type=int, default=1, help="GPUs that share the tokens of a rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--forward-prefetch", action="store_true", help="verl's fsdp_config.forward_prefetch")
    parser.add_argument("--profile", type=Path, help="folder for a profile of one step of the first shape on rank 0")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/scaling.csv"))
    args = parser.parse_args()
    if args.report is not None:
        print(report(read_csv(args.report)))
        return
    if RECORDED in args.shapes and args.data is None:
        parser.error("--shapes recorded: expected --data, received none; name recorded rows or leave the shape out")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    else:
        torch.distributed.init_process_group("gloo")
    for model in args.model:
        measure(args, model, rank, world)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
