"""Transformers' own routers: their auxiliary loss, and their top-k told what to answer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

PER_TOKEN = 2
"""Experts that a token visits."""


def auxiliary_loss(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Transformers' own loss of one padded batch of the rows."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss


def random_routes(
    rows: Sequence[Sequence[int]], *, seed: int, layers: int, experts: int, changed: float = 0.15
) -> list[np.ndarray]:
    """Routes [T, layers, PER_TOKEN] of each row that agree with other rows' often, but not always."""
    draw = np.random.default_rng(seed)
    table = np.stack([draw.permutation(experts)[:PER_TOKEN] for _ in range(3)]).astype(np.int16)
    shared = draw.integers(0, len(table), (max(map(len, rows)), layers))
    routes = []
    for row in rows:
        index = shared[: len(row)].copy()
        own = draw.random(len(row)) < changed
        index[own] = draw.integers(0, len(table), (int(own.sum()), layers))
        routes.append(table[index])
    return routes


@contextmanager
def stock_routers_told(routes: Sequence[np.ndarray], experts: int) -> Iterator[None]:
    """Rows one after the other through stock model code whose top-k answers with given experts, layer by layer; where
    a route repeats one, as one without a record does, with its own."""
    stock = torch.topk
    answers = chain.from_iterable(np.moveaxis(routes_TLK, 1, 0) for routes_TLK in routes)

    def told(values: torch.Tensor, k: int, dim: int = -1, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
        native = stock(values, k, dim=dim, **how).indices
        if values.shape[-1] < experts:
            return values.gather(-1, native), native  # A choice of groups of experts.
        wanted = torch.from_numpy(np.ascontiguousarray(next(answers))).long()
        index = torch.where((wanted == wanted[:, :1]).all(-1, keepdim=True), native, wanted)
        return values.gather(-1, index), index

    with patch.object(torch, "topk", told):
        yield
    assert next(answers, None) is None
