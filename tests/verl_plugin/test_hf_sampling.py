"""The sampler draws from the distribution whose log-probs it reports."""

import math

import pytest
import torch

from tree_rl.verl_plugin.embedded_rollout.sampling import Sampling, sample


def draw(logits: torch.Tensor, sampling: Sampling, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens, log_probs = sample(logits.expand(count, -1).clone(), [sampling] * count, [generator] * count)
    return torch.tensor(tokens), torch.tensor(log_probs)


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -30.0, float("-inf")])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"temperature": 0.5}, [0, 1, 2, 3]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 1]),
        ({"temperature": 2.0, "top_p": 0.9, "top_k": 3}, [0, 1, 2]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0]),
    ],
)
def test_frequencies_match_the_reported_log_probs(options: dict[str, float], kept: list[int]) -> None:
    tokens, log_probs = draw(LOGITS, Sampling(max_tokens=1, **options), 20000)
    scaled = LOGITS / options["temperature"]
    expected = torch.zeros(6)
    expected[kept] = torch.softmax(scaled[kept], 0)
    if len(kept) == 4:
        expected = torch.softmax(scaled, 0)
    counts = torch.bincount(tokens, minlength=6) / len(tokens)
    torch.testing.assert_close(counts, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(log_probs.exp(), expected[tokens], atol=1e-6, rtol=1e-5)


def test_greedy_takes_the_mode_and_reports_temperature_one() -> None:
    tokens, log_probs = draw(LOGITS, Sampling(max_tokens=1, temperature=0.0, top_p=0.5), 3)
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(log_probs, torch.log_softmax(LOGITS, 0)[0].expand(3))


def test_raw_log_probs_ignore_temperature_and_filters() -> None:
    tokens, log_probs = draw(LOGITS, Sampling(max_tokens=1, temperature=0.5, top_k=2, raw_log_probs=True), 50)
    torch.testing.assert_close(log_probs, torch.log_softmax(LOGITS, 0)[tokens])


def test_rows_of_different_kinds_share_a_batch() -> None:
    samplings = [Sampling(max_tokens=1, temperature=0.0), Sampling(max_tokens=1, top_k=1), Sampling(max_tokens=1)]
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    tokens, log_probs = sample(LOGITS.expand(3, -1).clone(), samplings, generators)
    assert tokens[:2] == [0, 0] and math.isclose(log_probs[1], 0.0, abs_tol=1e-6)


def test_a_seed_decides_the_draw_whatever_shares_the_batch() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    seeded = Sampling(max_tokens=1, seed=5)
    alone = sample(logits, [seeded], [torch.Generator().manual_seed(5)])
    batch = sample(
        logits.expand(3, -1).clone(),
        [Sampling(max_tokens=1), seeded, Sampling(max_tokens=1)],
        [torch.Generator().manual_seed(1), torch.Generator().manual_seed(5), torch.Generator().manual_seed(2)],
    )
    assert batch[0][1] == alone[0][0]
