"""Edge log-probs and entropies, and their gradients, equal log_softmax of every edge alone in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from edge_problems import HIDDEN, TOKENS, edge_problem, evaluate, leaves_of, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_kernels import edge_log_probs
from tree_kernels.edge_log_probs import rows_of_edges

TOLERANCE = 1e-10
VOCABULARY = 37


def problem(edges: int, seed: int = 0, *, sources: int = TOKENS) -> dict[str, torch.Tensor]:
    data = edge_problem(edges, VOCABULARY, torch.float64, seed=seed, sources=sources)
    for name in ("hidden", "weight", "bias"):
        data[name].requires_grad_()
    return data


def edge_by_edge(
    data: dict[str, torch.Tensor], temperature: Any, softcap: float | None, *, entropy: bool, of_logits: bool
) -> list[torch.Tensor]:
    """Log-probs, entropies and sums of squared probabilities, and their gradients."""
    leaves = leaves_of(data, torch.float64, of_logits=of_logits)
    logits_NV = leaves[0] if of_logits else leaves[0] @ leaves[1].T + leaves[2]
    found_of_edges = log_probs, entropies, squares = [], [], []
    for edge, (source, target) in enumerate(zip(data["source"].tolist(), data["target"].tolist(), strict=True)):
        logits = logits_NV[source]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if temperature is not None:
            logits = logits / (temperature[edge] if isinstance(temperature, torch.Tensor) else temperature)
        distribution = torch.distributions.Categorical(logits=logits)
        log_probs.append(distribution.log_prob(torch.tensor(target)))
        entropies.append(distribution.entropy())
        squares.append(distribution.probs.square().sum().detach())
    nothing = logits_NV.sum() * torch.zeros(0, dtype=torch.float64)
    log_prob, entropies_E, squared = (torch.stack(found) if found else nothing for found in found_of_edges)
    return with_gradients(data, leaves, (log_prob, entropies_E if entropy else None, squared.detach()))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert not actual.numel() or float((actual - expected).detach().abs().max()) < TOLERANCE


def check(data: dict[str, torch.Tensor], temperature: Any, softcap: float | None, chunk_rows: int | None) -> None:
    for entropy, of_logits in product((False, True), repeat=2):
        expected = edge_by_edge(data, temperature, softcap, entropy=entropy, of_logits=of_logits)
        options = {"temperature": temperature, "softcap": softcap, "chunk_rows": chunk_rows, "entropy": entropy}
        for impl in ("chunked",) if of_logits else ("chunked", "reference"):
            found = evaluate(data, torch.float64, impl, of_logits=of_logits, **options)
            for actual, want in zip(found, expected, strict=True):
                assert_close(actual, want)


@pytest.mark.parametrize(("edges", "chunk_rows"), [(0, None), (1, 1), (3, 7), (63, None), (64, 7), (65, 1), (129, 7)])
def test_every_number_of_edges_and_chunk(edges: int, chunk_rows: int | None) -> None:
    check(problem(edges), None, None, chunk_rows)


@pytest.mark.parametrize(
    ("temperature", "softcap", "sources"),
    [(0.3, None, 1), (0.3, 1.5, 3), (1.0, None, 3), (1.0, 1.5, TOKENS), ("mixed", None, TOKENS), ("mixed", 1.5, 1)],
)
def test_temperature_softcap_and_shared_sources(temperature: Any, softcap: float | None, sources: int) -> None:
    data = problem(50, sources=sources)
    check(data, data["temperature"] if temperature == "mixed" else temperature, softcap, 4)


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(0, 30), st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_random_edges(edges: int, seed: int, sources: int, chunk_rows: int, mixed: bool) -> None:
    data = problem(edges, seed, sources=sources)
    check(data, data["temperature"] if mixed else None, None, chunk_rows)


@pytest.mark.parametrize("impl", ("chunked", "reference"))
def test_no_bias_is_a_bias_of_zeros(impl: str) -> None:
    data = problem(20)
    given, zeros = [data[name] for name in ("hidden", "weight", "source", "target")], torch.zeros_like(data["bias"])
    without, with_zeros = (edge_log_probs(*given, bias=bias, impl=impl).log_prob for bias in (None, zeros))
    assert_close(without, with_zeros)


def test_edges_of_one_source_and_temperature_share_a_row() -> None:
    source = torch.tensor([5, 2, 5, 2, 5])
    target = torch.tensor([1, 2, 3, 2, 1])
    rows = rows_of_edges(source, target, 0.7)
    assert rows.source.tolist() == [2, 5]
    mixed = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0])
    rows = rows_of_edges(source, target, mixed)
    assert rows.source.tolist() == [2, 5, 5]
    assert isinstance(rows.row_temperature, torch.Tensor) and rows.row_temperature[:, 0].tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        *(pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (torch.bfloat16, torch.float32)),
    ],
)
def test_lower_precision_is_summed_in_float32(device: str, dtype: torch.dtype) -> None:
    data = edge_problem(200, 515, dtype, device=device)
    options: dict[str, Any] = {"entropy": True, "temperature": data["temperature"]}
    found = evaluate(data, dtype, "chunked", chunk_rows=8, **options)
    exact = evaluate(data, torch.float64, "reference", **options)
    for value, true in zip(found[:3], exact[:3], strict=True):
        assert value.dtype == torch.float32 and float((value - true).detach().abs().max()) < 1e-5
    for got, true in zip(found[3:], exact[3:], strict=True):
        # Half a unit in the last of 8 bits: only the gradient's own rounding is left.
        error = float((got.double() - true).norm() / true.norm())
        assert got.dtype == dtype and error < (2**-8 if dtype == torch.bfloat16 else 1e-5)


def test_no_tensor_of_all_rows_by_vocabulary_is_alive() -> None:
    """Chunks of 2 rows: the largest tensor that autograd saves is the head weight, not a block of logits."""
    saved: list[int] = []
    data = problem(60)

    def record(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        edge_log_probs(data["hidden"], data["weight"], data["source"], data["target"], entropy=True, chunk_rows=2)
    assert max(saved) == max(TOKENS, VOCABULARY) * HIDDEN


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"head_weight_VC": torch.zeros(5, 3)}, r"expected hidden \[N, C\]"),
        ({"head_weight_VC": torch.zeros(5, 4).double()}, "one dtype"),
        ({"edge_target": torch.zeros(2, dtype=torch.long)}, "one source and one target per edge"),
        ({"edge_source": torch.zeros(3)}, "integer edges"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"temperature": torch.ones(2)}, r"expected temperature \(3,\)"),
        ({"temperature": torch.ones(3).requires_grad_()}, "constant temperature"),
        ({"softcap": -1.0}, "softcap > 0"),
        ({"bias": torch.zeros(4)}, r"expected bias \[5\]"),
        ({"impl": "liger"}, "received 'liger'"),
        ({"chunk_rows": 0}, "chunk_rows >= 1"),
    ],
)
def test_what_does_not_fit_the_edges_is_named(changes: dict[str, Any], complaint: str) -> None:
    arguments: dict[str, Any] = {"hidden_NC": torch.zeros(6, 4), "head_weight_VC": torch.zeros(5, 4)}
    arguments |= dict.fromkeys(("edge_source", "edge_target"), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=complaint):
        edge_log_probs(**(arguments | changes))
