"""Fused head and log-probs: ours, plain torch and a public kernel on one flat problem, each behind a gate.

Every contender is first held against float64 on the leading `--gate-rows` rows. FLOPs counted are those of four
products of 2 R V C, one forward and three backward (recomputed logits, both gradients), whatever a contender computes.
Run: python benchmarks/kernels/edge_log_probs.py --out edge_log_probs.csv
Legend: R rows, V vocabulary, C hidden size, E edges.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_runs import Timer

from tree_kernels.edge_log_probs import EdgeRows, edge_log_probs_of_rows, rows_of_edges
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Columns, collect_rows

MODELS = {1024: "Qwen3-0.6B", 4096: "Qwen3-8B", 5120: "Qwen3-32B"}
LOG_PROB_ERROR = 1e-4
"""Largest error of a log-prob (absolute) that a policy ratio tolerates; contenders beyond it are marked."""
GRADIENT_ERROR = {torch.bfloat16: 6e-3, torch.float32: 2e-5}
"""Largest error of a gradient (relative norm): some roundings of the dtype."""

Outcome = tuple[torch.Tensor, torch.Tensor | None]
LogProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outcome]
"""(hidden [R, C], weight [V, C], target [R]) -> log-prob [R] and entropy [R] or None."""


def ours(impl: str, chunk_rows: int, *, entropy: bool) -> LogProbs:
    """Our own op, with one edge per row, found once as a training plan would."""

    @cache
    def edges(target_R: torch.Tensor) -> EdgeRows:
        return rows_of_edges(torch.arange(len(target_R)), target_R.cpu(), None).to(target_R.device)

    def run(hidden_RC: torch.Tensor, weight_VC: torch.Tensor, target_R: torch.Tensor) -> Outcome:
        values = edge_log_probs_of_rows(
            hidden_RC, weight_VC, edges(target_R), entropy=entropy, impl=impl, chunk_rows=chunk_rows
        )
        return values.log_prob, values.entropy

    return run


def liger(*, float32_sums: bool) -> LogProbs:
    """liger-kernel's fused linear cross-entropy, one loss per row."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def run(hidden_RC: torch.Tensor, weight_VC: torch.Tensor, target_R: torch.Tensor) -> Outcome:
        dtype = torch.float32 if float32_sums else None
        options = (None, None, -100, 0.0, 0.0, "none", None, False, dtype, False, False, False, None, None)
        loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(hidden_RC, weight_VC, target_R, *options, 1)
        return -loss, None

    return run


def contenders(chunk_sizes: list[int], baselines: list[str]) -> Iterator[tuple[str, int, LogProbs]]:
    """Name, rows per chunk (0: its own choice) and function of everything to be timed."""
    for chunk_rows in chunk_sizes:
        yield "triton", chunk_rows, ours("triton", chunk_rows, entropy=True)
    middle = chunk_sizes[(len(chunk_sizes) - 1) // 2]
    yield "triton_without_entropy", middle, ours("triton", middle, entropy=False)
    if "chunked" in baselines:
        yield "chunked", middle, ours("chunked", middle, entropy=True)
    if "liger" in baselines:
        yield "liger", 0, liger(float32_sums=False)
        yield "liger_float32_sums", 0, liger(float32_sums=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Hidden states of unit variance and a head whose logits have a spread of three."""

    hidden_RC: torch.Tensor
    weight_VC: torch.Tensor
    target_R: torch.Tensor
    grad_R: torch.Tensor

    @classmethod
    def draw(cls, rows: int, vocabulary: int, hidden: int, dtype: torch.dtype) -> "Problem":
        """A seeded problem on the GPU."""
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        return cls(
            hidden_RC=normal(rows, hidden).to(dtype).requires_grad_(),
            weight_VC=(normal(vocabulary, hidden) * 3 / hidden**0.5).to(dtype).requires_grad_(),
            target_R=torch.randint(vocabulary, (rows,), generator=generator, device="cuda"),
            grad_R=normal(rows),
        )

    def head(self, rows: int) -> "Problem":
        """The first rows."""
        leaf = self.hidden_RC.detach()[:rows].clone().requires_grad_()
        return Problem(
            hidden_RC=leaf, weight_VC=self.weight_VC, target_R=self.target_R[:rows], grad_R=self.grad_R[:rows]
        )


Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def evaluate(problem: Problem, log_probs: LogProbs, dtype: torch.dtype | None = None) -> Outputs:
    """Log-probs, entropies, and gradients of a loss of both."""
    leaves = [problem.hidden_RC, problem.weight_VC]
    if dtype is not None:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    log_prob, entropy = log_probs(leaves[0], leaves[1], problem.target_R)
    loss = (log_prob * problem.grad_R).sum()
    if entropy is not None:
        loss = loss + (entropy * problem.grad_R.flip(0)).sum()
    return log_prob.detach(), None if entropy is None else entropy.detach(), *torch.autograd.grad(loss, leaves)


def errors(actual: Outputs, expected: Outputs) -> tuple[float, float | None, float, float]:
    """Largest absolute errors of the values, relative errors (norm) of the gradients."""

    def relative(got: torch.Tensor, want: torch.Tensor) -> float:
        difference = sum(float((g - w).square().sum()) for g, w in zip(got.split(4096), want.split(4096), strict=True))
        return (difference / float(want.square().sum())) ** 0.5

    entropy = None
    if actual[1] is not None and expected[1] is not None:
        entropy = float((actual[1] - expected[1]).abs().max())
    log_prob = float((actual[0] - expected[0]).abs().max())
    return log_prob, entropy, relative(actual[2], expected[2]), relative(actual[3], expected[3])


def measure(problem: Problem, log_probs: LogProbs, timer: Timer) -> tuple[float, float, float]:
    """Forward without graph and forward with backward, in milliseconds; GiB beyond the inputs at the peak."""

    def forward() -> None:
        with torch.no_grad():
            log_probs(problem.hidden_RC.detach(), problem.weight_VC.detach(), problem.target_R)

    forward_ms = timer.milliseconds(forward).median
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    total_ms = timer.milliseconds(lambda: evaluate(problem, log_probs)).median
    return forward_ms, total_ms, (torch.cuda.max_memory_allocated() - base) / 2**30


def gemm_ceiling(problem: Problem, timer: Timer) -> None:
    """Print TFLOP/s of the projection alone, in pieces of 2048 rows, for half and single precision outputs."""
    hidden_RC, weight_VC = problem.hidden_RC.detach()[:2048], problem.weight_VC.detach()
    flops = 2 * len(hidden_RC) * weight_VC.numel()
    for dtype in {hidden_RC.dtype, torch.float32}:
        out = torch.empty(len(hidden_RC), len(weight_VC), dtype=dtype, device="cuda")
        kinds = {} if dtype == hidden_RC.dtype else {"out_dtype": dtype}
        product = partial(torch.mm, hidden_RC, weight_VC.T, out=out, **kinds)
        ms = timer.milliseconds(product).median
        print(f"# product alone, C={hidden_RC.shape[1]}, {dtype} out: {flops / ms / 1e9:.0f} TFLOP/s", flush=True)


def benchmark(arguments: argparse.Namespace, hidden: int, dtype: torch.dtype) -> Iterator[Columns]:
    """Gate and time every contender at one hidden size."""
    problem = Problem.draw(arguments.rows, arguments.vocabulary, hidden, dtype)
    timer = Timer(torch.device("cuda"), group_seconds=arguments.group_seconds)
    gemm_ceiling(problem, timer)
    part = problem.head(arguments.gate_rows)
    # Our plain implementation, which the tests hold against the definition.
    exact = {entropy: ours("chunked", 512, entropy=entropy) for entropy in (True, False)}
    expected = {entropy: evaluate(part, run, torch.float64) for entropy, run in exact.items()}
    flops = 2 * arguments.rows * arguments.vocabulary * hidden
    for name, chunk_rows, log_probs in contenders(arguments.chunk_rows, arguments.baselines):
        got = evaluate(part, log_probs)
        log_prob, entropy, hidden_error, weight_error = errors(got, expected[got[1] is not None])
        del got
        is_exact = log_prob <= LOG_PROB_ERROR and max(hidden_error, weight_error) <= GRADIENT_ERROR[dtype]
        if name.startswith("triton") and not is_exact:
            raise SystemExit(f"{name}: wrong by {log_prob:.1e}, {hidden_error:.1e}, {weight_error:.1e}; nothing timed")
        forward_ms, total_ms, peak = measure(problem, log_probs, timer)
        torch.cuda.empty_cache()
        rates = {"forward_tflops": flops / forward_ms / 1e9, "total_tflops": 4 * flops / total_ms / 1e9}
        print(
            f"C={hidden} {name}@{chunk_rows}: forward {rates['forward_tflops']:.1f}, forward and backward "
            f"{rates['total_tflops']:.1f} TFLOP/s, {peak:.2f} GiB, log-prob error {log_prob:.1e}",
            flush=True,
        )
        yield {
            "model": MODELS.get(hidden, ""),
            "dtype": arguments.dtype,
            "rows": arguments.rows,
            "vocabulary": arguments.vocabulary,
            "hidden": hidden,
            "contender": name,
            "chunk_rows": chunk_rows,
            "forward_ms": forward_ms,
            "total_ms": total_ms,
            **rates,
            "peak_extra_gib": peak,
            "log_prob_error": log_prob,
            "entropy_error": entropy,
            "hidden_gradient_error": hidden_error,
            "weight_gradient_error": weight_error,
            "is_exact": is_exact,
        }


def main() -> None:
    """Print a line per contender and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="outside a git checkout")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(MODELS))
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--baselines", nargs="*", default=["chunked", "liger"])
    parser.add_argument("--gate-rows", type=int, default=2048)
    parser.add_argument("--group-seconds", type=float, default=0.5, help="length of a group of repeats")
    parser.add_argument("--out", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    measured = (row for hidden in arguments.hidden for row in benchmark(arguments, hidden, dtype))
    collect_rows(measured, provenance(commit=arguments.commit), arguments.out)


if __name__ == "__main__":
    main()
