"""Partitions on one GPU: the paper's figure (83k unique, 164k flat, C = 60k), and peak memory against tree size.

python benchmarks/partition_gpu.py figure --model 0.6b --out docs/benchmarks
python benchmarks/partition_gpu.py memory --model 0.6b --out docs/benchmarks
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import collect_rows
from tree_rl.models import use_tree_attention
from tree_rl.training.loss.edges import plan_edges
from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.loss.readout import EdgeReadout
from tree_rl.training.partitioned import PartitionedRun
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import plan_partitions

CUDA = torch.device("cuda")
MODELS = ("0.6b", "8b")
VOCAB = MODEL_SIZES["8b"].shape.vocab
TRAINED_SHARE = 0.3
"""Share of tokens with a loss: what agents generate; the rest are prompts and observations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One step."""

    seconds: float
    peak_bytes: int
    forward_tokens: int
    backward_tokens: int


def build(name: str) -> Any:
    """A random Qwen3 in bf16 with gradient checkpointing."""
    torch.manual_seed(0)
    config = Qwen3Config(**MODEL_SIZES[name].config() | {"tie_word_embeddings": True})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model)
    return model.train()


def agent_tree(draw: np.random.Generator) -> Forest:
    """A tree of the paper's size: 83k unique and about 164k flat tokens, branching at three depths."""
    trunk = draw.integers(1, VOCAB, 11_400)
    arms = [np.concatenate([trunk, draw.integers(1, VOCAB, size)]) for size in (9_000, 8_000, 7_000)]
    leaves = [8_600, 7_100, 9_100, 7_500, 8_300, 7_000]
    rows = [np.concatenate([arms[i // 2], draw.integers(1, VOCAB, size)]) for i, size in enumerate(leaves)]
    return Forest.from_rows(rows)


def bushy_tree(draw: np.random.Generator, unique: int) -> Forest:
    """A prompt of 8k tokens under branches of 4k: no path is longer than 12k."""
    prompt = draw.integers(1, VOCAB, 8_000)
    branches = max(1, (unique - 8_000) // 4_000)
    return Forest.from_rows([np.concatenate([prompt, draw.integers(1, VOCAB, 4_000)]) for _ in range(branches)])


def deep_tree(draw: np.random.Generator, unique: int) -> Forest:
    """One trunk with a stub of 2k tokens at every quarter: the longest path is most of the tree."""
    trunk = draw.integers(1, VOCAB, unique - 8_000)
    cuts = [len(trunk) * quarter // 4 for quarter in (1, 2, 3, 4)]
    return Forest.from_rows([np.concatenate([trunk[:cut], draw.integers(1, VOCAB, 2_000)]) for cut in cuts])


def step(model: Any, forest: Forest, capacity: int, *, offload: bool = False) -> Measured:
    """One forward and backward of the trained share of the edges."""
    draw = np.random.default_rng(1)
    wanted_F = (draw.random(forest.num_unique) < TRAINED_SHARE)[forest.row_index.values]
    wanted_F[forest.row_index.offsets[1:] - 1] = False
    plan = plan_partitions(forest, capacity)
    edges = plan_edges(forest, wanted_F, np.ones(forest.num_rows, dtype=np.float32), CUDA)
    readout = EdgeReadout(plan, edges, device=CUDA)
    weight_E = torch.bincount(edges.reads.edge_W, minlength=len(edges.target_E))

    def gradients(values: EdgeOutputs) -> EdgeOutputs:
        return EdgeOutputs(log_probs=-weight_E.to(values["log_probs"]) / forest.num_flat)

    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run = PartitionedRun(model, forest, plan, readout, offload=offload)
    for _ in run.train(gradients):
        pass
    torch.cuda.synchronize()
    return Measured(
        seconds=time.perf_counter() - started,
        peak_bytes=torch.cuda.max_memory_allocated(),
        forward_tokens=run.count.forward,
        backward_tokens=run.count.backward,
    )


def figure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The paper's tree whole and at C = 60k, interleaved, in one process."""
    model, forest = build(args.model), agent_tree(np.random.default_rng(0))
    capacities = {"whole": forest.num_unique, "partitioned": 60_000}
    for capacity in capacities.values():
        step(model, forest, capacity)
    seconds: dict[str, list[float]] = {name: [] for name in capacities}
    last = {}
    for _ in range(args.repeats):
        for name, capacity in capacities.items():
            last[name] = step(model, forest, capacity)
            seconds[name].append(last[name].seconds)
    whole = statistics.median(seconds["whole"])
    for name, capacity in capacities.items():
        plan = plan_partitions(forest, capacity)
        yield {
            "run": name,
            "unique": forest.num_unique,
            "flat": forest.num_flat,
            "capacity": capacity,
            "partitions": plan.num_partitions,
            "relayed_tokens": plan.relayed_tokens,
            "forward_tokens": last[name].forward_tokens,
            "backward_tokens": last[name].backward_tokens,
            "median_s": round(statistics.median(seconds[name]), 4),
            "time_over_whole": round(statistics.median(seconds[name]) / whole, 4),
            "min_s": round(min(seconds[name]), 4),
            "max_s": round(max(seconds[name]), 4),
            "peak_gib": round(last[name].peak_bytes / 2**30, 2),
            "relayed_gib": round(plan.relayed_tokens * _kv_bytes(args.model) / 2**30, 3),
        }


def memory(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Peak memory against tree size at a fixed C."""
    model = build(args.model)
    shapes = {"bushy": bushy_tree, "deep": deep_tree}
    for shape, unique, offload in [
        *(("bushy", n, False) for n in (50_000, 100_000, 200_000, 400_000, 1_000_000)),
        *(("deep", n, offload) for n in (50_000, 100_000, 150_000) for offload in (False, True)),
    ]:
        if args.shape not in (shape, "all"):
            continue
        forest = shapes[shape](np.random.default_rng(0), unique)
        plan = plan_partitions(forest, args.capacity)
        measured = step(model, forest, args.capacity, offload=offload)
        yield {
            "shape": shape,
            "unique": forest.num_unique,
            "flat": forest.num_flat,
            "capacity": args.capacity,
            "offload": offload,
            "partitions": plan.num_partitions,
            "depth": plan.depth,
            "peak_live_tokens": plan.peak_live_tokens,
            "seconds": round(measured.seconds, 2),
            "peak_gib": round(measured.peak_bytes / 2**30, 2),
        }


def main() -> None:
    """Run one benchmark and write its CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("figure", "memory"))
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--capacity", type=int, default=32_768)
    parser.add_argument("--shape", choices=("bushy", "deep", "all"), default="all", help="of the memory benchmark")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    about = {
        "model": f"qwen3-{args.model} random bf16, gradient checkpointing",
        **provenance(commit=args.commit),
    }
    measured = {"figure": figure, "memory": memory}[args.benchmark](args)
    collect_rows(printed(measured), about, args.out / f"partition_{args.benchmark}_{args.model}.csv")


def printed(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same rows, each printed as it comes."""
    for row in rows:
        print(row, flush=True)
        yield row


def _kv_bytes(name: str) -> int:
    shape = MODEL_SIZES[name].shape
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize


if __name__ == "__main__":
    main()
