"""Grows a prompt's finished sessions into trees: rounds of choosing cuts and playing branches, under a budget."""

import asyncio
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from tree_rl.rollout.branching.policies import POLICIES, Policy, within_budget
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording

logger = logging.getLogger(__name__)

COUNTS = ("expansions", "branches", "every_tokens", "depth")
"""Options of the built-in policies that are at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchOptions:
    """How the sessions of a prompt branch. Raises `ValueError` for an unknown policy, option or value."""

    policy: str
    """`turns` (Tree-GRPO), `entropy` (ARPO, AEPO), `tail` (BranPO), `fixed` (VinePPO, SPO, TreePO), or a function as
    `package.module.function`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the policy."""
    rounds: int = 1
    """Number of times that the policy chooses; later rounds see the branches of earlier ones."""
    budget_tokens: int | None = None
    """Limit of generated tokens per prompt, first sessions included. A branch starts only if it fits when it becomes as
    long as the session that it leaves. None: no limit."""
    copies: bool = True
    """True copies a local sandbox's files after every tool call, so that branches start from a copy. False executes the
    recorded calls again, as for all other environments."""

    def __post_init__(self) -> None:
        counts: dict[str, Any] = {"rounds": self.rounds, "budget_tokens": self.budget_tokens}
        if self.policy in POLICIES:
            counts |= {f"options.{name}": self.options.get(name) for name in COUNTS}
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"branching.{name}={count}: expected an integer of at least 1")
        for name, value in self.options.items() if self.policy in POLICIES else ():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"branching.options.{name}={value!r}: expected a number")
        try:
            inspect.signature(self.choose).bind((), random.Random(), **self.options)
        except (TypeError, ImportError, AttributeError) as error:
            raise ValueError(f"branching.policy={self.policy}, or its options: {error}") from error

    @property
    def choose(self) -> Policy:
        """The policy's function."""
        if self.policy in POLICIES:
            return POLICIES[self.policy]
        module, _, name = self.policy.rpartition(".")
        if not module:
            known = ", ".join(POLICIES)
            raise ValueError(f"branching.policy={self.policy!r}: expected one of {known}, or package.module.function")
        found: Policy = getattr(import_module(module), name)
        return found


async def grow(
    sessions: Sequence[Recording],
    play: Callable[[Recording], Awaitable[Any]],
    options: BranchOptions,
    *,
    branches: list[Recording],
    number: int,
    rng: random.Random,
    vocabulary: int,
    spent: int = 0,
) -> None:
    """Branch from the finished first sessions of a prompt until rounds, cuts or budget end.

    Args:
        sessions: those that finished.
        play: runs the session of a recording with a `fork`, and finishes the recording. A failure leaves it out.
        branches: gets all branches, also those that fail; those that could not start have a `fault`.
        number: of the first branch.
        vocabulary: number of tokens, for entropies.
        spent: number of tokens that first sessions generated which failed.
    """
    finished = list(sessions)
    for round_ in range(options.rounds if finished else 0):
        left = options.budget_tokens
        if left is not None:
            left -= spent + sum(one.generated_tokens for one in (*sessions, *branches))
        try:
            forks = _choose(finished, options, left, rng, vocabulary)
        except Exception:
            # The policy may be a user's function; what ran so far is kept.
            logger.exception("branching.policy=%s failed; the prompt gets no more branches", options.policy)
            break
        if not forks:
            break
        # Nothing branches from the last round.
        copies = options.copies and round_ < options.rounds - 1
        new = [Recording(number=number + index, fork=fork, copies=copies) for index, fork in enumerate(forks)]
        number += len(new)
        branches += new
        for one, result in zip(new, await asyncio.gather(*map(play, new), return_exceptions=True), strict=True):
            if not isinstance(result, BaseException):
                finished.append(one)
                continue
            reason = str(result) or type(result).__name__
            # Sessions that do not repeat themselves are no bug, and every branch of theirs ends up here.
            is_bug = not isinstance(result, NotForked) and (one.fault is None or one.fault not in reason)
            if not one.session and one.fault is None:
                one.fault = reason
            logger.warning("branch %d is left out: %s", one.number, reason, exc_info=result if is_bug else None)


def _choose(
    finished: Sequence[Recording], options: BranchOptions, left: int | None, rng: random.Random, vocabulary: int
) -> list[Fork]:
    known = [one.nodes(vocabulary) for one in finished]
    cuts = within_budget(options.choose(known, rng, **options.options), known, left)
    by_number = {one.number: one for one in finished}
    return [Fork(parent=by_number[cut.session], token=cut.token) for cut in cuts for _ in range(cut.k)]
