"""Dialects that write reasoning between two marks before the visible text: all but gpt-oss's."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from tree_rl.rollout.gateway.dialects.dialect import CallFault, Dialect, Reading, Tools, UnreadableCallError
from tree_rl.rollout.gateway.dialects.json_text import skip_space
from tree_rl.rollout.gateway.dialects.typed_text import is_offered
from tree_rl.rollout.gateway.protocols.messages import CalledTool

_NO_NAME = re.compile(r"""[\s(){}\[\]<>"'=]""")
"""Characters that no tool's name has: a call in another family's format may have its arguments in its name."""


class ThinkingDialect(Dialect):
    """A dialect with reasoning between marks. A subclass defines how its family writes calls."""

    end = ""
    """Mark that ends a call; empty if a call ends with its arguments."""

    def read(self, turn: str, *, tools: Tools, is_reasoning_open: bool) -> Reading:
        """Read a turn. If one call cannot be read, the whole visible turn is text, as from a stock server."""
        if not tools:
            thought, visible = self._split(turn, is_open=is_reasoning_open)
            return Reading(content=visible, reasoning=thought, marked_reasoning=turn[: len(turn) - len(visible)])
        start, is_closed = self._calls_begin(turn, tools, is_open=is_reasoning_open)
        thought, visible = self._split(turn[:start], is_open=is_reasoning_open)
        visible += turn[start:]
        marked = turn[: len(turn) - len(visible)]
        try:
            found = self.read_calls(visible, tools)
            empty = [call.name for call in found.calls if not call.arguments]
            if any(_NO_NAME.search(name) and not is_offered(name, tools) for name in empty):
                raise UnreadableCallError("malformed")
        except UnreadableCallError as error:
            return Reading(content=visible, reasoning=thought, marked_reasoning=marked, fault=error.fault)
        if not is_closed or (not found.calls and self._hides_call(thought or "", visible)):
            found = replace(found, fault="in_reasoning")
        content = found.content.strip() if found.calls else visible
        return replace(found, content=content, reasoning=thought, marked_reasoning=marked)

    def _split(self, turn: str, *, is_open: bool) -> tuple[str | None, str]:
        """The reasoning without its marks (None if there is none), and the visible text, a suffix of `turn`.

        The text is empty if the reasoning was never closed.
        """
        start, end = self.marks
        thought, closed, visible = turn.partition(end)
        # An end mark at the start closes the empty reasoning that some templates begin.
        is_closed = closed and (is_open or start in thought or not thought.strip())
        if not is_closed:
            thought, visible = turn, ""
            if not (is_open or turn.lstrip().startswith(start)):
                return None, turn
        return thought.split(start, 1)[-1].strip("\n"), visible

    def _hides_call(self, thought: str, visible: str) -> bool:
        """True if the model seems to have made a call in its reasoning: nothing or the call's end follows."""
        return self.shows_call(thought) and (not visible.strip() or (self.end != "" and self.end in visible))

    @abstractmethod
    def shows_call(self, text: str) -> bool:
        """True if a call starts in a text."""

    def first_call(self, text: str, position: int) -> int:
        """The start of the first call after a position; the text's end if there is none."""
        return len(text)

    def call_in_reasoning(self, turn: str, closed: int, tools: Tools) -> int | None:
        """The start of a call by which the model ends its reasoning without the closing mark; None if there is none.

        Args:
            closed: position of the closing mark, which may belong to the call's arguments; the turn's end without one.
        """
        return None

    @abstractmethod
    def read_calls(self, text: str, tools: Tools) -> Reading:
        """Read the calls of a visible text, up to an opening mark of reasoning.

        A call at its end with a fault stays in the content. Raises `UnreadableCallError` for any other.
        """

    def _calls_begin(self, turn: str, tools: Tools, *, is_open: bool) -> tuple[int, bool]:
        """The start of the calls after the reasoning, and whether it was closed before them.

        Marks of reasoning in a call's arguments are text.
        """
        start, end = self.marks
        closed = _find(turn, end, 0)
        has_reasoning = is_open or turn.lstrip().startswith(start)
        call = self.call_in_reasoning(turn, closed, tools) if has_reasoning else None
        if call is not None:
            return call, False
        return (len(turn) if closed == len(turn) else self.first_call(turn, closed if has_reasoning else 0)), True


class CallsBetweenTags(ThinkingDialect):
    """A dialect whose calls start with a mark. Everything around them is text."""

    start: re.Pattern[str]
    """Pattern of a call's start."""
    wrappers: tuple[str, ...] = ()
    """Tags around the group of all calls of a turn."""
    ends_reasoning = ""
    """Mark that ends open reasoning and starts a call, as in the engines' parsers of the family; empty for none."""

    def read_calls(self, text: str, tools: Tools) -> Reading:
        """Read the calls of a text. A last call that the turn's end cuts off stays text."""
        around: list[str] = []
        calls: list[CalledTool] = []
        fault: CallFault | None = None
        done = reasoning = 0
        while (found := self.start.search(text, done)) is not None:
            if reasoning < done or not reasoning:
                reasoning = _find(text, self.marks[0], done)
            if reasoning < found.start():
                fault = "in_reasoning"
                break
            try:
                written, end = self.read_call(text, found, tools)
            except UnreadableCallError as error:
                is_cut = self.end not in text[found.end() :] if self.end else error.fault == "unclosed"
                if not is_cut:
                    raise UnreadableCallError("malformed" if error.fault == "unclosed" else error.fault) from error
                fault = "unclosed"
                break
            around.append(text[done : found.start()])
            calls += written
            done = end
        outside = "".join([*around, text[done : _find(text, self.marks[0], done)]])
        for wrapper in self.wrappers:
            outside = outside.replace(wrapper, "")
        return Reading(content=outside, calls=tuple(calls), fault=fault)

    def shows_call(self, text: str) -> bool:
        return self.start.search(text) is not None

    def call_in_reasoning(self, turn: str, closed: int, tools: Tools) -> int | None:
        """The start of the first complete call in reasoning that is not closed before the call's end."""
        mark = self.ends_reasoning
        position = _find(turn, mark, 0) if mark else closed
        while position < closed:
            found = self.start.search(turn, position)
            if found is None:
                return None
            try:
                _, end = self.read_call(turn, found, tools)
            except UnreadableCallError as error:
                if error.fault == "unclosed":
                    return None
                end = 0
            is_first = not turn[position + len(mark) : found.start()].strip()
            if is_first and (end > closed or (end and closed == len(turn))):
                return position
            position = _find(turn, mark, position + len(mark))
        return None

    def first_call(self, text: str, position: int) -> int:
        found = self.start.search(text, position)
        return len(text) if found is None else found.start()

    @abstractmethod
    def read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[Sequence[CalledTool], int]:
        """Read the calls after a start mark; return them and their end. Raises `UnreadableCallError`."""

    def after(self, text: str, position: int, mark: str) -> int:
        """The position after a mark that must follow, ignoring white space. Raises `UnreadableCallError`."""
        position = skip_space(text, position)
        if not text.startswith(mark, position):
            raise UnreadableCallError("unclosed" if mark.startswith(text[position:]) else "malformed")
        return position + len(mark)


def _find(text: str, mark: str, start: int) -> int:
    """The position of a mark from `start` on; the text's end if there is none."""
    found = text.find(mark, start)
    return len(text) if found < 0 else found
