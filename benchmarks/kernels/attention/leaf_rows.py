"""Where flash-attn-4 gains from rows of leaves over copied keys instead of block lists; a CSV for `fa4_plan.MOST_KEYS`.

PYTHONPATH=.:kernels:benchmarks/kernels/attention python benchmarks/kernels/attention/leaf_rows.py --out leaf_rows.csv

Legend: N unique tokens, B leaves, F keys of all paths.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from contenders import Contender, passes, path_contender, tree_contender
from gate import inputs_of
from shapes import HEAD_LAYOUTS, SHAPES, Segments
from timing import Timer

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.fa4 import plan as fa4_plan
from tree_kernels.tree_attention.fa4.leaf_rows import leaf_rows
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv
from tree_rl.tree import Forest

LIMITS = {"lists": (0.0, 0), "rows of leaves": (float("inf"), 0)}
"""`MOST_KEYS` and `FEWEST_QUERIES` that leave no choice."""
PACKED = "rows alone"
LARGEST_ERROR = 2.0**-8
"""Between both ways, of outputs' gradients in bf16 (relative norm)."""
ROUNDS = 2


def groups(count: int, prompt: int, answers: int, length: int) -> Segments:
    """Prompts of equal size with as many answers each."""
    parents: list[int] = []
    for _ in range(count):
        parents += [-1, *[len(parents)] * answers]
    return Segments(parents=parents, lengths=[prompt, *[length] * answers] * count)


CASES: dict[str, Callable[[], Segments]] = {
    **{f"recorded trial, {n}": lambda n=n: SHAPES["recorded trial"](n) for n in (8_192, 32_768, 65_536, 131_072)},
    **{f"grpo, {n}": lambda n=n: SHAPES["grpo"](n) for n in (8_192, 32_768, 65_536, 131_072)},
    **{
        f"{count} x ({prompt} + {answers} x {length})": lambda sizes=(count, prompt, answers, length): groups(*sizes)
        for count, prompt, answers, length in (
            (4, 1500, 4, 3700),
            (2, 2048, 8, 3800),
            (8, 512, 8, 960),
            (8, 1024, 8, 896),
            (16, 64, 8, 504),
            (16, 512, 8, 448),
            (32, 32, 8, 252),
            (32, 256, 8, 224),
            (64, 64, 8, 120),
        )
    },
    "binary, 65536": lambda: SHAPES["binary"](65_536),
}


@contextmanager
def limits(most_keys: float, fewest_queries: float) -> Iterator[None]:
    """The rule's limits for a while."""
    own = fa4_plan.MOST_KEYS, fa4_plan.FEWEST_QUERIES
    fa4_plan.MOST_KEYS, fa4_plan.FEWEST_QUERIES = most_keys, fewest_queries
    try:
        yield
    finally:
        fa4_plan.MOST_KEYS, fa4_plan.FEWEST_QUERIES = own


def measure(forest: Forest, timer: Timer, device: torch.device) -> dict[str, float]:
    """Columns of one forest: medians of the better round, and how far both ways' results are apart."""
    heads, dtype = HEAD_LAYOUTS["qwen3-8b"], torch.bfloat16
    tree = tree_contender("fa4", forest, device)
    leaves, grad = inputs_of(tree.tokens, heads, dtype, device)
    packed = path_contender("fa4", forest, device, 300_000)
    packed_leaves, packed_grad = inputs_of(packed.tokens, heads, dtype, device)
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, limit in LIMITS.items():
            with limits(*limit):
                _time(name, tree, leaves, grad, timer, found)
        _time(PACKED, packed, packed_leaves, packed_grad, timer, found)
    results = []
    for limit in LIMITS.values():
        with limits(*limit):
            results.append(torch.autograd.grad(tree.run(*leaves), leaves, grad))
    apart = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(*results, strict=True))
    if not apart <= LARGEST_ERROR:
        raise RuntimeError(f"gradients of both ways: expected at most {LARGEST_ERROR} apart, received {apart}")
    return {name: min(values) for name, values in found.items()} | {"gradients_apart": apart}


def _time(
    name: str,
    contender: Contender,
    leaves: list[torch.Tensor],
    grad: torch.Tensor,
    timer: Timer,
    found: dict[str, list[float]],
) -> None:
    for what, run in passes(contender, leaves, grad).items():
        found.setdefault(f"{name} {what}_ms", []).append(timer.milliseconds(run).median * contender.scale)


def main() -> None:
    """Measure every case, print a line each, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--commit", help="outside a git checkout")
    parser.add_argument("--group-seconds", type=float, default=0.05, help="length of a group of repeats")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    timer = Timer(device, group_seconds=arguments.group_seconds)
    about = provenance(commit=arguments.commit)
    rows: list[dict[str, object]] = []
    for name, build in CASES.items():
        forest = build().forest()
        layout = TreeLayout.from_subtree_end(torch.from_numpy(forest.subtree_end))
        found = leaf_rows(layout, most_keys=float("inf"), fewest_queries=0)
        assert found is not None
        keys, num_rows = int(found.key_offsets[-1]), len(found.key_offsets) - 1
        shape = {"keys_per_token": keys / forest.num_unique, "tokens_per_row": forest.num_unique / num_rows}
        times = measure(forest, timer, device)
        ratio = times["rows of leaves total_ms"] / times["lists total_ms"]
        print(f"{name}: {shape}, rows of leaves over lists {ratio:.3f}", flush=True)
        rows.append({"case": name, "unique_tokens": forest.num_unique, **shape, **times, **about})
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
