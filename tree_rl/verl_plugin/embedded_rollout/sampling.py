"""Samples tokens from logits, and returns the log-prob of each in the distribution it was sampled from.

verl compares these with the actor's log-probs at the rollout temperature (`logprobs_mode: processed_logprobs`). Greedy
tokens have the log-prob at temperature 1, as in vLLM. Shapes: R rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NO_JSON = "json_output=enforce: rollout.name=hf cannot force JSON; choose json_output=instruct, or rollout.name=vllm"
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "stop": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of one request; raises a ValueError that names a parameter out of range."""

    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = -1
    """Number of candidates kept; -1 or 0 keeps all."""
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Tokens after which generation ends; the output contains them."""
    seed: int | None = None
    """Seed of a separate generator for the request; None uses the server's."""
    raw_log_probs: bool = False
    """True reports log-probs before temperature and filters (`logprobs_mode: raw_logprobs`)."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: expected at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected a value in (0, 1]")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}: expected -1 (all) or a number of candidates")


def parse_sampling(
    params: Mapping[str, Any],
    *,
    default_max_tokens: int,
    limit_tokens: int,
    eos_token_ids: frozenset[int],
    logprobs_mode: str = "processed_logprobs",
) -> Sampling:
    """Read the sampling parameters that verl sends with a request, by vLLM's names.

    The context has room for `limit_tokens`. Raises a ValueError that names a parameter that is unknown, or whose value
    is not implemented.
    """
    rest = dict(params)
    limits = [rest.pop("max_tokens", None), rest.pop("max_new_tokens", None), default_max_tokens]
    requested = next(limit for limit in limits if limit is not None)
    stop_token_ids = frozenset(rest.pop("stop_token_ids", None) or ())
    if not rest.pop("ignore_eos", False):
        stop_token_ids |= eos_token_ids
    rest.pop("logprobs", None)
    known = {key: rest.pop(key) for key in ("temperature", "top_p", "top_k", "seed") if key in rest}
    if "json_schema" in rest:
        raise ValueError(NO_JSON)
    for key, value in rest.items():
        if key not in NEUTRAL:
            raise ValueError(f"sampling parameter {key}={value!r}: not known to rollout.name=hf")
        if value != NEUTRAL[key] and value:
            raise ValueError(
                f"sampling parameter {key}={value!r}: rollout.name=hf only implements {key}={NEUTRAL[key]!r}; "
                "use rollout.name=vllm or sglang"
            )
    return Sampling(
        max_tokens=max(1, min(requested, limit_tokens)),
        stop_token_ids=stop_token_ids,
        raw_log_probs=logprobs_mode == "raw_logprobs",
        **known,
    )


@torch.no_grad()
def sample(
    logits_RV: torch.Tensor,
    samplings: Sequence[Sampling],
    generators: Sequence[torch.Generator],
    *,
    never: Sequence[int] = (),
) -> tuple[list[int], list[float]]:
    """Sample one token per row, with its generator on the CPU; return R token ids and their log-probs.

    Tokens of `never`, such as those of images, are not drawn, but log-probs count them, as the trainer's do.
    """
    logits_RV = logits_RV.float()
    scale = [1.0 if s.temperature == 0 else s.temperature for s in samplings]
    processed_RV = logits_RV
    if any(s != 1.0 for s in scale):
        processed_RV = logits_RV / torch.tensor(scale, device=logits_RV.device).unsqueeze(1)
    drawn_share_R: torch.Tensor | float = 0.0
    if never:
        total_R = processed_RV.logsumexp(dim=-1)
        processed_RV = processed_RV.index_fill(1, torch.tensor(never, device=logits_RV.device), float("-inf"))
        drawn_share_R = processed_RV.logsumexp(dim=-1) - total_R
    if any(s.temperature > 0 and (s.top_p < 1 or s.top_k > 0) for s in samplings):
        processed_RV = _filtered(processed_RV, samplings)
    log_probs_RV = torch.log_softmax(processed_RV, dim=-1)

    tokens_R = log_probs_RV.argmax(dim=-1)
    drawn = [row for row, s in enumerate(samplings) if s.temperature > 0]
    if drawn:
        uniform = torch.stack([torch.rand((), generator=generators[row], dtype=torch.float64) for row in drawn])
        tokens_R[drawn] = _inverse_cdf(log_probs_RV[drawn], uniform.to(logits_RV.device))
    reported_R = log_probs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1) + drawn_share_R
    if any(s.raw_log_probs for s in samplings):
        raw_R = torch.log_softmax(logits_RV, dim=-1).gather(1, tokens_R.unsqueeze(1)).squeeze(1)
        is_raw = torch.tensor([s.raw_log_probs for s in samplings], device=logits_RV.device)
        reported_R = torch.where(is_raw, raw_R, reported_R)
    return tokens_R.tolist(), reported_R.tolist()


def _inverse_cdf(log_probs_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    cdf_RV = log_probs_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    # Scaling by the total (1 up to rounding) keeps the last token's share. `right` skips tokens of probability 0.
    target_R1 = (uniform_R * cdf_RV[:, -1]).unsqueeze(1)
    return torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1).clamp_(max=cdf_RV.shape[1] - 1)


def _filtered(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    vocabulary = logits_RV.shape[1]
    top_k = [s.top_k if s.top_k > 0 and s.temperature > 0 else vocabulary for s in samplings]
    top_p = [s.top_p if s.temperature > 0 else 1.0 for s in samplings]
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True)
    rank_V = torch.arange(vocabulary, device=logits_RV.device)
    drop_RV = rank_V >= torch.tensor(top_k, device=logits_RV.device).unsqueeze(1)
    kept_RV = sorted_RV.masked_fill(drop_RV, float("-inf")).softmax(dim=-1)
    mass_before_RV = kept_RV.cumsum(dim=-1) - kept_RV
    limit_R1 = torch.tensor(top_p, device=logits_RV.device).unsqueeze(1)
    drop_RV |= (mass_before_RV >= limit_R1) & (limit_R1 < 1) & (rank_V > 0)
    return logits_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), float("-inf"))
