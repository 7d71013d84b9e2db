"""The Triton kernels of edge log-probs equal the float64 reference: in the interpreter on a CPU, compiled on CUDA."""

from typing import Any

import pytest
import torch
from edge_problems import HIDDEN, TOKENS, edge_problem, evaluate
from torch.utils._python_dispatch import TorchDispatchMode

from tree_kernels import UnsupportedImplementation
from tree_kernels.edge_log_probs import (
    chosen_implementation,
    edge_log_probs,
    edge_log_probs_of_rows,
    logits_edge_log_probs,
    products,
    rows_of_edges,
    unavailable_reason,
)

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels.edge_log_probs.edge_values import EdgeOptions
from tree_kernels.edge_log_probs.triton_kernels import autograd
from tree_kernels.edge_log_probs.triton_kernels.launch import unwritten_statistics, write_statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter is wrong in bfloat16
# Relative error in norm: values are summed in float32, gradients are rounded to the dtype of the input.
VALUE_ERROR = 4e-6
GRADIENT_ERROR = {torch.float64: 1e-10, torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def problem(edges: int, vocabulary: int, dtype: torch.dtype, *, sources: int = TOKENS) -> dict[str, torch.Tensor]:
    return edge_problem(edges, vocabulary, dtype, sources=sources, device=DEVICE.type)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        is_value = got.dim() == 1 and got.dtype == torch.float32
        allowed = VALUE_ERROR if is_value and dtype != torch.float32 else GRADIENT_ERROR[dtype]
        if got.numel():
            # A gradient that vanishes (one edge whose distribution is flat) is judged against inputs of order one.
            error = float((got.double() - want).detach().norm() / want.detach().norm().clamp(min=1e-2))
            assert error < allowed, (error, got.shape)


def check(data: dict[str, torch.Tensor], dtype: torch.dtype, *, chunk_rows: int | None, **options: Any) -> None:
    """From hidden states, and from logits."""
    for of_logits, given in ((False, {"chunk_rows": chunk_rows}), (True, {})):
        yardstick = "chunked" if of_logits else "reference"
        computed = ((dtype, "triton"), (torch.float64, yardstick))
        assert_close(*(evaluate(data, *how, of_logits=of_logits, **given, **options) for how in computed), dtype)


# The vocabularies cross the blocks of both kernels (2048 and 4096 columns).
PROBLEMS = [(0, 37, None), (1, 1, None), (1, 4097, 1), (3, 9000, 2), (63, 37, 7), (129, 130, None)]


# The interpreter is slow: it runs the problem of most blocks in both dtypes, the others in one of them.
@pytest.mark.parametrize(
    ("edges", "vocabulary", "chunk_rows", "dtype"),
    [
        (*sizes, dtype)
        for number, sizes in enumerate(PROBLEMS)
        for turn, dtype in enumerate((torch.float32, HALF))
        if DEVICE.type == "cuda" or sizes[1] == 9000 or (number + turn) % 2 == 0
    ],
)
def test_every_number_of_edges_and_chunk(
    edges: int, vocabulary: int, chunk_rows: int | None, dtype: torch.dtype
) -> None:
    check(problem(edges, vocabulary, dtype), dtype, chunk_rows=chunk_rows, entropy=True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_long_rows_are_summed_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, product_of_all = [], products.add_product
    monkeypatch.setattr(autograd, "LONGEST_SUM_BESIDE_TARGETS", 5)
    monkeypatch.setattr(products, "add_product", lambda *a, **k: (parts.append(a[0].shape[1]), product_of_all(*a, **k)))
    check(problem(65, 300, dtype), dtype, chunk_rows=None, entropy=True)
    assert set(parts) == (set() if dtype == torch.float32 else {4})


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_targets_are_summed_again(softcap: float | None) -> None:
    vocabulary, edges = 700, 24
    data = problem(edges, vocabulary, torch.float32)
    rows = rows_of_edges(data["source"], data["target"], data["temperature"])
    # Strided along both dimensions, as a transposed weight or a slice of hidden states may be.
    hidden_UC = data["hidden"].T.contiguous().T[rows.source]
    weight_VC = data["weight"].T.contiguous().T
    exact_UV = (hidden_UC.double() @ weight_VC.double().T).float()
    wrong_UV = exact_UV + 0.01 * torch.randn(exact_UV.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    options = EdgeOptions(entropy=True, softcap=softcap, sum_pi_squared=False, chunk_rows=16)
    factor_U = unwritten_statistics(rows, options, DEVICE).inverse_temperature_U

    def scores(logits: torch.Tensor) -> torch.Tensor:
        capped = logits.double() + data["bias"].double()
        return (capped if softcap is None else softcap * torch.tanh(capped / softcap)) * factor_U.double()[:, None]

    written: list[torch.Tensor] = []
    for factors in (None, (hidden_UC, weight_VC)):
        outputs, pairs = unwritten_statistics(rows, options, DEVICE), slice(0, rows.num_rows)
        given = {"bias_V": data["bias"], "softcap": softcap, "factors": factors, "gathers": False}
        write_statistics(wrong_UV, rows, pairs, outputs, **given)
        assert torch.allclose(outputs.lse_U.double(), scores(wrong_UV).logsumexp(1), rtol=1e-6, atol=1e-5)
        written.append(outputs.log_prob_E.double()[rows.order])
    each = torch.arange(edges, device=DEVICE)
    scores_EV = scores(wrong_UV)[rows.row]
    from_logits = scores_EV.log_softmax(1)[each, rows.target]
    scores_EV[each, rows.target] = scores(exact_UV)[rows.row, rows.target]
    with_targets = scores_EV.log_softmax(1)[each, rows.target]
    assert torch.allclose(written[0], from_logits, atol=1e-5)
    assert torch.allclose(written[1], with_targets, atol=1e-5)
    assert (from_logits - with_targets).abs().max() > 1e-3


# Every pair of values.
@pytest.mark.parametrize(
    ("temperature", "softcap", "entropy"),
    [
        *((None, None, False), (None, 1.5, True), (0.3, None, True), (0.3, 1.5, False)),
        *(("mixed", None, False), ("mixed", 1.5, True)),
    ],
)
def test_temperature_softcap_and_shared_sources(temperature: Any, softcap: float | None, entropy: bool) -> None:
    data = problem(30, 50, torch.float32, sources=4)
    given = data["temperature"] if temperature == "mixed" else temperature
    check(data, torch.float32, chunk_rows=5, temperature=given, softcap=softcap, entropy=entropy)


def test_scores_beyond_the_range_of_the_exponential() -> None:
    data = problem(20, 5000, torch.float32)
    for name, scale in (("hidden", 200), ("weight", 4), ("bias", 4)):
        data[name] = (data[name] * scale).round()  # integers: the scores, up to 1e4, are exact in any order of sums
    check(data, torch.float32, chunk_rows=3, entropy=True)


def test_small_scores_under_a_cap_keep_their_digits() -> None:
    data = problem(20, 64, torch.float32)
    data["hidden"] *= 1e-3
    check(data, torch.float32, chunk_rows=3, softcap=30.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # 0 * inf, selected away afterwards
@pytest.mark.parametrize("masked", [slice(3, 4), slice(0, 4500)])
def test_a_masked_token_has_no_share_in_entropy_and_no_nan_in_its_gradient(masked: slice) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[:, masked] = float("-inf")
    target = torch.tensor([4600, 4700, 4800, 4900], device=DEVICE)
    kept = ~logits[0].isneginf()
    alone = logits[:, kept].double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=alone)
    expected = [distribution.log_prob(kept.cumsum(0)[target] - 1), distribution.entropy()]
    expected.append(torch.autograd.grad(sum(expected).sum(), alone)[0])
    for impl, dtype in (("triton", torch.float32), ("chunked", torch.float64)):
        leaf = logits.to(dtype).requires_grad_()
        values = logits_edge_log_probs(leaf, torch.arange(4, device=DEVICE), target, entropy=True, impl=impl)
        assert values.entropy is not None
        (gradient,) = torch.autograd.grad(values.log_prob.sum() + values.entropy.sum(), leaf)
        assert_close([values.log_prob, values.entropy, gradient[:, kept]], expected, dtype)
        assert torch.equal(gradient[:, masked], torch.zeros_like(gradient[:, masked]))


@pytest.mark.parametrize("target", [-1, 37])
def test_a_target_outside_the_vocabulary_is_nan(target: int) -> None:
    data = problem(3, 37, torch.float32)
    data["target"][1] = target
    from_hidden = edge_log_probs(data["hidden"], data["weight"], data["source"], data["target"], impl="triton")
    from_logits = logits_edge_log_probs(data["hidden"], data["source"], data["target"], impl="triton")
    assert from_logits.log_prob.isnan().tolist()[1]
    assert from_hidden.log_prob.isnan().tolist() == [False, True, False]


def test_only_what_needs_a_gradient_gets_one() -> None:
    data = problem(20, 50, torch.float32)
    full = [data[name].clone().requires_grad_() for name in ("hidden", "weight")]
    expected = torch.autograd.grad(
        edge_log_probs(*full, data["source"], data["target"], impl="triton").log_prob.sum(), full
    )
    for index in range(2):
        leaves = [data["hidden"], data["weight"]]
        leaves[index] = leaves[index].clone().requires_grad_()
        values = edge_log_probs(*leaves, data["source"], data["target"], impl="triton", chunk_rows=3)
        (gradient,) = torch.autograd.grad(values.log_prob.sum(), leaves[index])
        assert_close([gradient], [expected[index].double()], torch.float32)


class _Largest(TorchDispatchMode):
    """Records the largest tensors that ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.sizes[out.dtype] = max(self.sizes.get(out.dtype, 0), out.numel())
        return out


def test_logits_alive_are_those_of_a_chunk() -> None:
    """Neither direction holds [rows, V]: the largest float32 tensor is a chunk of logits."""
    vocabulary, chunk_rows = 9000, 2
    data = problem(10, vocabulary, torch.float32, sources=10)
    leaves = [data[name].clone().requires_grad_() for name in ("hidden", "weight")]
    rows = len(data["source"].unique())
    chunk = chunk_rows * vocabulary
    with _Largest() as largest:
        values = edge_log_probs(*leaves, data["source"], data["target"], impl="triton", chunk_rows=chunk_rows)
        values.log_prob.sum().backward()
    # Pieces of columns are rounded up to 256 columns; the head weight's gradient is an output.
    assert max(largest.sizes[torch.float32], 0) <= max(chunk + 256 * rows, vocabulary * HIDDEN)
    assert rows * vocabulary > chunk + 256 * rows


def test_no_float32_copy_of_the_head_weights_gradient_exists() -> None:
    vocabulary = 9000
    data = problem(8, vocabulary, HALF)
    leaves = [data[name].clone().requires_grad_() for name in ("hidden", "weight")]
    log_prob = edge_log_probs(*leaves, data["source"], data["target"], impl="triton", chunk_rows=1).log_prob.sum()
    with _Largest() as largest:
        log_prob.backward()
    assert largest.sizes[HALF] == vocabulary * HIDDEN
    assert largest.sizes[torch.float32] < vocabulary * HIDDEN


def test_what_triton_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = torch.zeros(2, dtype=torch.long)
    refused = {torch.float64: "received torch.float64"}
    if DEVICE.type == "cpu":
        refused[torch.bfloat16] = "interpreter .* is wrong in bfloat16"
    for dtype, reason in refused.items():
        pair = torch.zeros(2, 3, 4, dtype=dtype, device=DEVICE).unbind()
        with pytest.raises(UnsupportedImplementation, match=reason):
            edge_log_probs(*pair, edges.to(DEVICE), edges.to(DEVICE), impl="triton")

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnsupportedImplementation, match="CUDA device"):
        edge_log_probs(*torch.zeros(2, 3, 4).unbind(), edges, edges, impl="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = unavailable_reason("triton", device=torch.device("cuda"), dtype=torch.float16)
    assert reason is not None and "the device has 7.5" in reason


def test_auto_is_triton_on_cuda_and_chunked_elsewhere() -> None:
    assert chosen_implementation(device=torch.device("cpu"), dtype=torch.float32) == "chunked"
    assert chosen_implementation(device=torch.device("cuda"), dtype=torch.float64) == "chunked"
    if DEVICE.type == "cuda":
        assert chosen_implementation(device=DEVICE, dtype=torch.bfloat16) == "triton"


@pytest.mark.gpu
def test_rows_found_beforehand_cost_no_synchronisation() -> None:
    data = problem(60, 5000, HALF)
    edges = (data[name].cpu() for name in ("source", "target", "temperature"))
    rows = rows_of_edges(*edges)
    leaves = [data[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]

    def step() -> None:
        values = edge_log_probs_of_rows(*leaves[:2], rows.to("cuda"), bias=leaves[2], entropy=True, chunk_rows=4)
        assert values.entropy is not None
        (values.log_prob.sum() + values.entropy.sum()).backward()

    step()  # compiles the kernels
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
