"""Rows whose shapes each broke some tree trainer: the "known traps", as PPO rows with a prompt and a response mask."""

from dataclasses import replace
from typing import Any

import numpy as np
from engine_harness import VOCAB, Row, ppo_batch
from tensordict import TensorDict


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def row(ids: list[int], *, prompt: int = 2, mask: list[int] | None = None, **fields: object) -> Row:
    """A row whose whole response is trained unless a mask says otherwise."""
    return Row(tokens=ids, prompt=prompt, mask=[1] * (len(ids) - prompt) if mask is None else mask, **fields)


TRUNK, DEEP = tokens(1, 12), tokens(2, 65)
SHAPES: dict[str, list[Row]] = {
    "branches": [row(TRUNK + tokens(10 + i, 5 + i), advantage=(-1.0) ** i) for i in range(4)],
    "strict_prefix": [row(TRUNK[:6]), row(TRUNK[:9], advantage=-1.0), row(TRUNK)],
    "identical": [row(TRUNK), row(TRUNK), row(TRUNK, advantage=-2.0)],
    "single_response_token": [row(TRUNK[:3]), row([*TRUNK[:2], 5]), row([7, 8, 9])],
    "no_common_root": [row(tokens(20 + i, 6)) for i in range(3)],
    "masks_differ_on_shared_prefix": [
        row(TRUNK + tokens(30 + i, 4), mask=mask) for i, mask in enumerate(([0, 1] * 7, [1, 0] * 7, [0] * 10 + [1] * 4))
    ],
    "one_row_untrained": [row(TRUNK + tokens(33, 3)), row(TRUNK + tokens(34, 3), mask=[0] * 13)],
    "prompts_of_different_length": [row(TRUNK + tokens(35 + i, 3), prompt=4 + 5 * i) for i in range(3)],
    "branch_at_63_64_65": [row(DEEP[: 63 + i] + tokens(40 + i, 3)) for i in range(3)],
    "two_groups": [row(TRUNK + tokens(50 + i, 4), uid="a" if i < 2 else "b", advantage=1.0 - i) for i in range(4)],
    "temperatures_differ": [row(TRUNK + tokens(60 + i, 4), temperature=t) for i, t in enumerate((1.0, 0.7, 1.3, 0.7))],
    "comb": [row(TRUNK[: 3 + 2 * i] + tokens(70 + i, 3), advantage=i - 1.5) for i in range(4)],
}
WHOLE = (
    *("branches", "comb", "identical", "strict_prefix", "masks_differ_on_shared_prefix", "one_row_untrained"),
    *("no_common_root", "temperatures_differ", "prompts_of_different_length", "single_response_token"),
)


def whole_rows() -> list[Row]:
    """Hostile groups in one batch."""
    return [replace(one, uid=name) for name in WHOLE for one in SHAPES[name]]


def whole_batch(**flags: Any) -> TensorDict:
    rows = whole_rows()
    return ppo_batch(rows, calculate_entropy=True, global_batch_size=len(rows), **flags)
