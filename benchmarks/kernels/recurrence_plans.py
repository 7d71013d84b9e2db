"""Host time to plan the Gated DeltaNet layers of a forest: the convolution's windows, and the delta rule's chains.

Every repeat plans a layout that knows nothing yet, and sends the plan to the device without waiting for it.

python benchmarks/kernels/recurrence_plans.py
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tree_kernels import TreeLayout
from tree_kernels.tree_causal_conv1d.triton_kernels.window_lists import window_lists
from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import device_plan
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import TILE_TOKENS
from tree_rl.benchmark.batch import agent_batch
from tree_rl.inspection.text import format_table

# The registry of trees is that of the attention benchmark, a folder that runs as a script.
sys.path.insert(0, str(Path(__file__).parent / "attention"))
from shapes import SHAPES

REGISTRY = ("grpo", "stubs", "tiny", "chains", "causal")
TOKENS = (32_768, 65_536)
OVERLAPS = (0.5, 0.85)
TAPS = 4
HEADER = ("forest", "tokens", "convolution ms", "delta rule ms", "together ms", "slowest ms")


def forests() -> dict[str, np.ndarray]:
    """Subtree ends by name: 16 rows of 8,192 as `tree-rl bench` draws them, and trees of the kernels' benchmarks."""
    ends = {}
    for overlap in OVERLAPS:
        batch = agent_batch(por=overlap, num_rows=16, row_tokens=8192, num_groups=1, trained_share=0.3, vocab=1000)
        ends[f"16 rows, POR {overlap}"] = batch.forest().subtree_end
    for shape in REGISTRY:
        for tokens in TOKENS:
            ends[f"{shape}, {tokens}"] = SHAPES[shape](tokens).forest().subtree_end
    return ends


def milliseconds(end: np.ndarray, device: torch.device) -> tuple[float, float]:
    """Host time for the convolution and, after it, for the delta rule."""
    end_N = torch.from_numpy(end.astype(np.int32))
    layout = TreeLayout.from_subtree_end(end_N.to(device), on_host=end_N.numpy())
    convolution = _timed(lambda: window_lists(layout, TAPS))
    return convolution, _timed(lambda: device_plan(layout, TILE_TOKENS, ()))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Print the medians of every forest."""
    is_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    lines = []
    for name, end in forests().items():
        times = np.array([milliseconds(end, torch.device(args.device)) for _ in range(args.repeats + 1)])[1:]
        together = times.sum(1)
        values = (*np.median(times, axis=0), np.median(together), together.max())
        lines.append((name, str(len(end)), *(f"{value:.2f}" for value in values)))
    print(format_table(HEADER, lines))


if __name__ == "__main__":
    main()
