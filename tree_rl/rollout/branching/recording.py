"""What a session records so that others can branch from it: model calls, tool calls, and copies of its state."""

import asyncio
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tree_rl.rollout.branching.policies import Node, SessionNodes
from tree_rl.rollout.environments.environment import ToolCall
from tree_rl.rollout.gateway.calls.agent_names import MAIN
from tree_rl.rollout.gateway.resumption import Resumption
from tree_rl.rollout.sandbox.ownership import OwnedFolder
from tree_rl.rollout.transcript import ModelCall

ENTROPY_TOKENS = 20
"""Number of first tokens of a call in its entropy, as in ARPO's code."""


class NotForked(RuntimeError):  # noqa: N818
    """No branch can start: the session does not repeat itself, or has no such token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One tool call and what the agent saw."""

    call: ToolCall
    result: str
    seconds: tuple[float, float]
    """Start and end in this session, by `time.monotonic`."""
    began: int
    """Place in the order in which the calls began when they were executed; a branch keeps it."""
    ended: int
    """Place in the order in which they ended."""
    saved: Path | None = None
    """Copy of the environment's files after it; None if there is none."""


@dataclass(kw_only=True, slots=True, eq=False)
class Recording:
    """One session of a prompt, while it runs and after it."""

    number: int
    """Number of the session among those of its prompt."""
    fork: "Fork | None" = None
    """Where it branched from, once closed where it really did; None for a first session."""
    copies: bool = True
    """True copies the environment's files after each tool call, where it can."""
    session: str = ""
    """Name of the session at the gateway; empty until it is closed."""
    calls: tuple[ModelCall, ...] = ()
    """Its model calls, those of its parent included; empty until it is closed."""
    reward: float = 0.0
    tool_calls: list[RecordedCall] = field(default_factory=list)
    """Its tool calls, those of its parent included."""
    replayed_calls: int = 0
    """Number of tool calls executed again to reach the state of the cut."""
    fault: str | None = None
    """Why it could not branch; None if it did, and for a first session."""
    _folder: OwnedFolder | None = None

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the model generated for it, without those of its parent."""
        shared = 0 if self.fork is None else self.fork.token
        return max(0, sum(len(call.response_ids) for call in self.calls) - shared)

    @property
    def tree(self) -> int:
        """Number of the first session that it grew from."""
        return self.number if self.fork is None else self.fork.parent.tree

    def folder_for_copy(self) -> Path:
        """An empty folder, until `close`."""
        if self._folder is None:
            self._folder = OwnedFolder("copies")
        return Path(tempfile.mkdtemp(dir=self._folder.path))

    def finish(self, session: str, calls: tuple[ModelCall, ...], resumption: Resumption | None) -> None:
        """Keep the record of the closed session, `session` at the gateway; sets `fault` if it never came to its cut."""
        self.session, self.calls = session, calls
        if self.fork is not None and resumption is not None and resumption.dropped:
            self.fork = replace(self.fork, token=self.fork.token - resumption.dropped)
        if resumption is not None and self.fault is None:
            self.fault = resumption.fault or (None if resumption.is_live else "the agent ended before the cut")

    async def close(self) -> None:
        """Delete the copies. Branches can no longer start from them."""
        if self._folder is not None:
            await asyncio.to_thread(self._folder.close)
            self._folder = None

    def nodes(self, vocabulary: int) -> SessionNodes:
        """Statistics for the policies, of the calls at which a branch can start.

        A branch keeps all that ended before the call and nothing that began later, so nothing may overlap it. Entropies
        need the size of the vocabulary.
        """
        cut = None if self.fork is None else self.fork.token
        nodes = []
        for index, call, start in _positions(self.calls):
            end = start + len(call.response_ids)
            if (cut is not None and end <= cut) or not self._is_alone(index):
                continue
            before, logs = self._tools_before(call) if index else [], call.log_probs
            nodes.append(
                Node(
                    start=start if cut is None else max(start, cut),
                    end=end,
                    turn=index,
                    entropy=None if logs is None else -sum(logs[:ENTROPY_TOKENS]) / math.log(vocabulary),
                    after_tool=any(self.calls[index - 1].seconds[1] <= tool.seconds[1] for tool in before),
                )
            )
        return SessionNodes(
            session=self.number,
            reward=self.reward,
            tokens=sum(len(call.response_ids) for call in self.calls),
            turns=len(self.calls),
            nodes=tuple(nodes),
            parent=None if self.fork is None else self.fork.parent.number,
            cut=cut,
        )

    def _tools_before(self, call: ModelCall) -> list[RecordedCall]:
        return [tool for tool in self.tool_calls if tool.seconds[1] <= call.seconds[0]]

    def _is_alone(self, index: int) -> bool:
        """True for a call of the main line that no other call, tool or sub-agent overlaps."""
        call = self.calls[index]
        if call.agent != MAIN or call.side is not None or not call.response_ids:
            return False
        spans = [tool.seconds for tool in self.tool_calls]
        by_agent: dict[str, list[tuple[float, float]]] = {}
        for number, other in enumerate(self.calls):
            if number != index:
                by_agent.setdefault(other.agent, []).append(other.seconds)
        spans += by_agent.pop(MAIN, [])
        # A sub-agent lives from its first call to its last.
        spans += [(min(span)[0], max(end for _, end in span)) for span in by_agent.values()]
        return all(end <= call.seconds[0] or start >= call.seconds[1] for start, end in spans)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fork:
    """A place in a finished session at which a branch starts."""

    parent: Recording
    token: int
    """Number of the session's generated tokens that the branch keeps."""

    @property
    def tool_calls(self) -> list[RecordedCall]:
        """The tool calls before the cut, in the order of their ends."""
        return sorted(self.parent._tools_before(self._last[1]), key=lambda tool: tool.ended)

    def resumption(self) -> Resumption:
        """The model calls before the cut, for the gateway."""
        index, last, start = self._last
        return Resumption(self.parent.session, self.parent.calls[:index], last, self.token - start)

    @property
    def _last(self) -> tuple[int, ModelCall, int]:
        for index, call, start in _positions(self.parent.calls):
            if start <= self.token < start + len(call.response_ids):
                return index, call, start
        last, session = sum(len(call.response_ids) for call in self.parent.calls) - 1, self.parent.number
        raise NotForked(f"cut at token {self.token}: expected a token that session {session} generated, 0 to {last}")


def _positions(calls: tuple[ModelCall, ...]) -> Iterator[tuple[int, ModelCall, int]]:
    """(index, call, number of tokens generated before it)."""
    start = 0
    for index, call in enumerate(calls):
        yield index, call, start
        start += len(call.response_ids)
