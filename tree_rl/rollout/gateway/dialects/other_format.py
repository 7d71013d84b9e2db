"""Counts the calls that a dialect does not read because the chat template has another format."""

from collections.abc import Sequence
from dataclasses import replace

from tree_rl.rollout.gateway.dialects.dialect import Dialect, Reading, Tools
from tree_rl.rollout.gateway.dialects.typed_text import name_of


class OtherFormat:
    """A dialect that also reports calls in the template's format, which it does not read.

    Args:
        marks: texts that occur only in calls.
        before_name: text that precedes a tool's name only in calls; None if the marks suffice.
    """

    def __init__(self, dialect: Dialect, *, marks: Sequence[str], before_name: str | None) -> None:
        self._dialect = dialect
        self._marks = marks
        self._before_name = before_name
        self.name = dialect.name
        self.reasoning_end = dialect.reasoning_end
        self.opens_reasoning = dialect.opens_reasoning
        self.with_reasoning = dialect.with_reasoning
        self.call_id = dialect.call_id

    def read(self, turn: str, *, tools: Tools, is_reasoning_open: bool) -> Reading:
        reading = self._dialect.read(turn, tools=tools, is_reasoning_open=is_reasoning_open)
        if not tools or reading.calls or reading.fault is not None or not self._is_call(turn, tools):
            return reading
        return replace(reading, fault="other_format")

    def _is_call(self, turn: str, tools: Tools) -> bool:
        if any(mark in turn for mark in self._marks):
            return True
        return self._before_name is not None and any(self._before_name + name_of(tool) in turn for tool in tools)
