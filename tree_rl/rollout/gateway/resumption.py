"""Answers the calls of a branch from the record of another session up to a cut, and from there by the model.

The agent runs again from the start and asks again; it gets the recorded tokens and log-probs, so its state at the cut,
and every token before it, are those of the recorded session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tree_rl.rollout.gateway.backend import Backend, BackendError, FinishReason, Generation
from tree_rl.rollout.gateway.generation import joined
from tree_rl.rollout.transcript import ModelCall


class Resumption:
    """The recorded start of one branch; wraps the model server of its session.

    Args:
        session: id of the recorded session; ids of tool calls are made of it, and templates may write them.
        calls: recorded calls before the cut.
        last: the call in which the cut is.
        keep: number of its generated tokens before the cut.
    """

    def __init__(self, session: str, calls: Sequence[ModelCall], last: ModelCall, keep: int) -> None:
        self.session = session
        self.is_live = False
        """True once the model generated: everything recorded was asked for. A call that fails may be asked again."""
        self.dropped = 0
        """Number of tokens before the cut that were sampled again, in a constrained call."""
        self.fault: str | None = None
        """What the agent asked instead of the recorded calls; None if it repeated them."""
        # Equal prompts get the recorded answers in the order in which they were asked.
        self._left = sorted(calls, key=lambda call: call.seconds)
        self._last = last
        self._keep = keep
        self._backend: Backend | None = None

    def before(self, backend: Backend) -> Backend:
        """Put this record in front of a model server."""
        self._backend = backend
        return self

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        assert self._backend is not None
        if self.is_live:
            return await self._backend.generate(prompt_ids, max_tokens=max_tokens, sampling=sampling, session=session)
        asked = tuple(prompt_ids)
        if self._left:
            return self._recorded(asked, max_tokens)
        # A constraint restarts with each request, so a constrained call is sampled again as a whole.
        keep = 0 if "json_schema" in sampling else self._keep
        start = self._position(asked, self._last)
        if start is None or start > keep:
            raise self._differs()
        kept = _part(self._last, start, min(keep, start + max_tokens), "length")
        left = max_tokens - len(kept.token_ids)
        if not left:
            return kept
        more = await self._backend.generate(
            [*asked, *kept.token_ids], max_tokens=left, sampling=sampling, session=session
        )
        if more.finish_reason != "abort":
            self.is_live, self.dropped = True, self._keep - keep
        return joined(kept, more) if kept.token_ids else more

    def _recorded(self, asked: tuple[int, ...], max_tokens: int) -> Generation:
        matching = [(one, start) for one in self._left if (start := self._position(asked, one)) is not None]
        if not matching:
            raise self._differs()
        call, start = matching[0]
        end = min(len(call.response_ids), start + max_tokens)
        is_whole = end == len(call.response_ids)
        if is_whole:
            self._left.remove(call)
        finish: FinishReason = (call.finish_reason or "stop") if is_whole else "length"
        return replace(_part(call, start, end, finish), routes=call.routes if is_whole else None)

    def _position(self, asked: tuple[int, ...], call: ModelCall) -> int | None:
        """The number of a call's generated tokens that a prompt ends with; None if it is not a prompt of this call."""
        start = len(asked) - len(call.prompt_ids)
        is_prompt = 0 <= start < max(1, len(call.response_ids)) and asked == call.prompt_ids + call.response_ids[:start]
        return start if is_prompt else None

    def _differs(self) -> BackendError:
        self.fault = "the agent does not repeat its calls: a prompt differs from the recorded ones"
        return BackendError(self.fault, status=403)


def _part(call: ModelCall, start: int, end: int, finish: FinishReason) -> Generation:
    return Generation(
        token_ids=call.response_ids[start:end],
        log_probs=None if call.log_probs is None else call.log_probs[start:end],
        finish_reason=finish,
        min_version=call.min_version,
        max_version=call.max_version,
    )
