"""Narrow against wide sections of heads in flash-attn-4's backward; a CSV for the rule of `head_sections`.

PYTHONPATH=.:kernels:kernels/benchmarks/attention python kernels/benchmarks/attention/head_sections.py --out out.csv
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
from contenders import tree_contender
from gate import inputs_of
from shapes import HEAD_LAYOUTS, SHAPES
from timing import Timer

from tree_kernels import TreeLayout
from tree_kernels.tree_attention import head_sections
from tree_kernels.tree_attention.head_sections import NARROW, WIDE, heads_of_section
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Spread, write_csv
from tree_rl.tree import Forest

CASES = [
    *product(("grpo", "stubs", "recorded call", "binary", "tiny"), ("qwen3-8b",), (32_768, 65_536)),
    *product(
        ("grpo", "stubs", "binary", "tiny"),
        ("qwen3-0.6b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.2-1b"),
        (32_768,),
    ),
]
PROCESSORS = {NARROW: 0, WIDE: math.inf}
"""Of devices for which the rule always takes these sections."""


@contextmanager
def forced(section: int) -> Iterator[None]:
    """Plans that are made meanwhile take these sections."""
    own = head_sections.PROCESSORS
    head_sections.PROCESSORS = PROCESSORS[section]  # type: ignore[assignment]
    try:
        yield
    finally:
        head_sections.PROCESSORS = own


def backward_of(forest: Forest, heads: str, section: int, device: torch.device) -> Callable[[], object]:
    """A backward, to be called again and again."""
    contender = tree_contender("fa4", forest, device)
    leaves, grad = inputs_of(contender.tokens, HEAD_LAYOUTS[heads], torch.bfloat16, device)
    with forced(section):
        out = contender.run(*leaves)
    return partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)


def measure(forest: Forest, heads: str, rounds: int, timer: Timer, device: torch.device) -> dict[str, object]:
    """Columns of one case: milliseconds of either, in turns, and what the rule takes."""
    runs = {section: backward_of(forest, heads, section, device) for section in PROCESSORS}
    times: dict[int, list[float]] = {section: [] for section in runs}
    for number in range(rounds):
        for section in random.Random(number).sample(sorted(runs), len(runs)):
            times[section].append(timer.one_group(runs[section]))
    columns: dict[str, object] = {}
    for section, name in ((NARROW, "narrow"), (WIDE, "wide")):
        spread = Spread.of(times[section])
        columns |= {f"{name}_ms": spread.median, f"{name}_ms_low": spread.low, f"{name}_ms_high": spread.high}
    layout = TreeLayout.from_subtree_end(torch.from_numpy(forest.subtree_end))
    queries = layout.subtree_end - torch.arange(layout.num_tokens)
    return columns | {
        "narrow_over_wide": Spread.of(times[NARROW]).median / Spread.of(times[WIDE]).median,
        "pairs_over_most_queries": int(queries.sum(dtype=torch.int64)) / int(queries.max()),
        "taken": heads_of_section(layout, window=None),
    }


def main() -> None:
    """Measure every case, print a line each, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--commit", help="outside a git checkout")
    parser.add_argument("--group-seconds", type=float, default=0.05, help="length of a group of repeats")
    parser.add_argument("--rounds", type=int, default=5, help="groups of either, in turns")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    timer = Timer(device, group_seconds=arguments.group_seconds)
    about = provenance(commit=arguments.commit)
    rows: list[dict[str, object]] = []
    for shape, heads, tokens in CASES:
        found = measure(SHAPES[shape](tokens).forest(), heads, arguments.rounds, timer, device)
        print(f"{shape}, {tokens}, {heads}: {found}", flush=True)
        rows.append({"shape": shape, "heads": heads, "unique_tokens": tokens, **found, **about})
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
