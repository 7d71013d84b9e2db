"""Seconds of FSDP's and Ulysses' collectives by size, and the latency and bandwidth that `tree-rl plan --ranks` takes.

    torchrun --nproc-per-node 2 benchmarks/collectives.py --out docs/benchmarks/collectives.csv

All-gather and reduce-scatter: bytes of the whole tensor. All-to-all: bytes that one rank holds. The fit is
seconds = latency + bytes * (ranks - 1) / ranks / bandwidth, least squares on relative errors. On a CPU it runs gloo.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from many_gpus.ranks import DEVICE, join_ranks, synchronized, worst

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Columns, read_csv, write_csv

MEGABYTE = 2**20


def operations(world: int, size: int) -> dict[str, Callable[[], object]]:
    """Each collective on tensors of `size` bytes, bf16 as FSDP gathers."""
    elements = size // 2 // world * world
    whole = torch.ones(elements, dtype=torch.bfloat16, device=DEVICE)
    other = torch.empty_like(whole)
    part = whole[: elements // world].clone()
    found: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    if DEVICE == "cuda":
        wide, own = whole.float(), part.float()
        found["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(own, wide)
    return found


def seconds_of(step: Callable[[], object], repeats: int) -> list[float]:
    """Of the slowest rank, after a warm-up."""
    found = []
    for index in range(repeats + 1):
        synchronized()
        began = time.perf_counter()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        slowest = worst(time.perf_counter() - began)
        if index:
            found.append(slowest)
    return found


def fit(sizes: Sequence[float], seconds: Sequence[float], ranks: int) -> tuple[float, float]:
    """Latency in seconds, not negative, and bandwidth in bytes a second; inf where more bytes take no longer."""
    sent = np.array(sizes) * (ranks - 1) / ranks
    weight = 1 / np.array(seconds)
    terms = np.stack([np.ones_like(sent), sent], axis=1) * weight[:, None]
    latency, slope = np.linalg.lstsq(terms, np.ones(len(sent)), rcond=None)[0]
    if latency < 0:
        latency, slope = 0.0, float(terms[:, 1] @ np.ones(len(sent)) / (terms[:, 1] @ terms[:, 1]))
    if slope <= 0:
        return float(weight.sum() / (weight @ weight)), math.inf
    return float(latency), float(1 / slope)


def main() -> None:
    """Measure as one rank of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 8, 32, 128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rank, world = join_ranks()
    times: dict[str, dict[int, list[float]]] = {}
    for megabytes in args.megabytes:
        for name, step in operations(world, megabytes * MEGABYTE).items():
            # Gradients are scattered in float32, twice the bytes.
            size = megabytes * MEGABYTE * (2 if name == "reduce_scatter" else 1)
            times.setdefault(name, {})[size] = seconds_of(step, args.repeats)
    if rank == 0:
        about = {"ranks": world, **provenance(commit=args.commit)}
        lines: list[Columns] = []
        for name, of_size in times.items():
            medians = [statistics.median(found) for found in of_size.values()]
            latency, bandwidth = fit(list(of_size), medians, world)
            print(f"{name}: latency {latency * 1e6:.0f} us, {bandwidth / 1e9:.0f} GB/s", flush=True)
            for (size, found), median in zip(of_size.items(), medians, strict=True):
                measured = {"collective": name, "bytes": size, "seconds": median}
                spread = {"seconds_low": min(found), "seconds_high": max(found)}
                lines.append(measured | spread | {"latency": latency, "bandwidth": bandwidth} | about)
        if args.out:
            write_csv(args.out, [*read_csv(args.out), *lines])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
