"""Recorded turn lengths of agents, and what rows become of them when thoughts are dropped from the history.

A turn is a reply and the observation behind it. The first half of a reply is its thought. Where a turn is edited, the
agent goes on without that thought, so the reply ends a row and the next turn opens another.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RECORDING = Path(__file__).with_name("airline_turns.json")
"""Tokens of the agents in examples/tau_bench_airline, as Qwen3's tokenizer counts them."""
SHARES = [step / 100 for step in range(101)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One call of the model in a session."""

    reply_tokens: int
    """That the model generates."""
    kept_tokens: int
    """Tokens of the reply's end that stay in the history; fewer than the reply has end a row here."""
    observation_tokens: int
    """Behind the reply, in the next call's context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionScript:
    """What a session does."""

    prompt_tokens: int
    turns: tuple[Turn, ...]

    def row_tokens(self) -> list[int]:
        """Tokens of each row."""
        context, rows = self.prompt_tokens, []
        for turn, is_last in zip(self.turns, [*[False] * (len(self.turns) - 1), True], strict=True):
            if is_last or turn.kept_tokens < turn.reply_tokens:
                rows.append(context + turn.reply_tokens)
            context += turn.kept_tokens + turn.observation_tokens
        return rows

    def own_tokens(self) -> int:
        """Unique tokens behind the prompt: those of the longest context, and every reply that is not part of it."""
        *before, last = self.turns
        edited = sum(turn.reply_tokens for turn in before if turn.kept_tokens < turn.reply_tokens)
        return sum(turn.kept_tokens + turn.observation_tokens for turn in before) + last.reply_tokens + edited


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """All sessions of a step: groups with a common prompt."""

    groups: tuple[tuple[SessionScript, ...], ...]

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return sum(len(session.row_tokens()) for group in self.groups for session in group)

    @property
    def flat_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(sum(session.row_tokens()) for group in self.groups for session in group)

    @property
    def unique_tokens(self) -> int:
        """Tokens of all trees, one a group."""
        return sum(group[0].prompt_tokens + sum(session.own_tokens() for session in group) for group in self.groups)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the model writes in a step."""
        return sum(turn.reply_tokens for group in self.groups for session in group for turn in session.turns)

    @property
    def longest_prompt(self) -> int:
        """Of all groups."""
        return max(group[0].prompt_tokens for group in self.groups)

    @property
    def longest_response(self) -> int:
        """Tokens behind the prompt in the longest row."""
        return max(max(session.row_tokens()) - session.prompt_tokens for group in self.groups for session in group)

    @property
    def por(self) -> float:
        """Potential overlap ratio: share of the row tokens that trees save."""
        return 1 - self.unique_tokens / self.flat_tokens


def script_with_overlap(
    por: float,
    *,
    groups: int,
    sessions: int,
    scale: float = 1.0,
    turns: int | None = None,
    single_turn: tuple[int, int] | None = None,
) -> Script:
    """The recorded sessions, with thoughts dropped in as many turns as bring the overlap nearest to `por`.

    `sessions` are those of each group, `scale` is a factor on all lengths, `turns` the most of a session (None: all).
    With `single_turn`, tokens of prompt and reply, every session has one such turn, whatever `por` is.
    """
    if single_turn is not None:
        prompt, reply = single_turn
        turn = Turn(reply_tokens=reply, kept_tokens=reply, observation_tokens=1)
        session = SessionScript(prompt_tokens=prompt, turns=(turn,))
        return Script(groups=((session,) * sessions,) * groups)
    tasks = json.loads(RECORDING.read_text())
    candidates = (
        Script(
            groups=tuple(
                tuple(
                    _session(tasks[group % len(tasks)], session, share=share, scale=scale, turns=turns)
                    for session in range(sessions)
                )
                for group in range(groups)
            )
        )
        for share in SHARES
    )
    return min(candidates, key=lambda script: abs(script.por - por))


Ask = Callable[[list[int], int], Awaitable[list[int]]]
"""(context, number of tokens to generate) -> reply."""


async def play_session(
    script: SessionScript, place: tuple[int, int], ask: Ask, *, vocab: int, tool_seconds: float = 0.0
) -> None:
    """Ask for each reply of a session. Raises `ValueError` for one of another length than the script says.

    `place`, group and session, decides the tokens that the model does not write.
    """
    group, session = place
    context = drawn_ids(script.prompt_tokens, vocab, group)
    for number, turn in enumerate(script.turns):
        if number:
            await asyncio.sleep(tool_seconds)
        reply = await ask(context, turn.reply_tokens)
        if len(reply) != turn.reply_tokens:
            raise ValueError(f"the script says {turn.reply_tokens} tokens behind {len(context)}, received {len(reply)}")
        kept = reply[len(reply) - turn.kept_tokens :]
        context = context + kept + drawn_ids(turn.observation_tokens, vocab, group, session, number)


def tool_seconds_of(step: int, tool_seconds: Sequence[float], unmeasured: int) -> float:
    """Seconds of every tool call in a step, counted from 1; steps behind `unmeasured` take one after the other."""
    return tool_seconds[max(0, step - 1 - unmeasured) % len(tool_seconds)]


def drawn_ids(count: int, vocab: int, *place: int) -> list[int]:
    """Token ids that a place in the script always has."""
    ids: list[int] = np.random.default_rng(place).integers(0, vocab, count).tolist()
    return ids


def _session(task: dict, session: int, *, share: float, scale: float, turns: int | None) -> SessionScript:
    lengths = task["sessions"][session % len(task["sessions"])][:turns]
    played = []
    for number, (reply, observation) in enumerate(lengths):
        reply_tokens = max(2, round(scale * reply))
        is_edited = int((number + 1) * share) > int(number * share)
        played.append(
            Turn(
                reply_tokens=reply_tokens,
                kept_tokens=reply_tokens - reply_tokens // 2 if is_edited else reply_tokens,
                observation_tokens=max(1, round(scale * observation)),
            )
        )
    return SessionScript(prompt_tokens=max(1, round(scale * task["prompt"])), turns=tuple(played))
