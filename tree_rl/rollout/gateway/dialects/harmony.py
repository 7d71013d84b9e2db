"""gpt-oss: a turn is a sequence of messages, each with a channel and optionally the tool that it calls.

`<|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>JSON<|call|>`. openai-harmony reads token ids of one vocabulary, which it downloads; this
parser reads text.
"""

import re
from dataclasses import dataclass, replace

from tree_rl.rollout.gateway.dialects.dialect import CallFault, Dialect, Reading, Tools, UnreadableCallError
from tree_rl.rollout.gateway.dialects.json_text import read_json, read_object, skip_space
from tree_rl.rollout.gateway.protocols.messages import CalledTool

_MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CALL = re.compile(r"\bto=[^\s<]+[^{]*<\|message\|>")
_BODY_END = re.compile(r"<\|(?:end|return|call|start)\|>")
_HEADER_START = re.compile(r"(?:<\|(?:end|return|call)\|>)?\s*(?:<\|start\|>assistant)?")
_MARKUP = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call)\|>")
_FUNCTIONS = "functions."


@dataclass(slots=True)
class _Turn:
    reasoning: list[str]
    content: list[str]
    calls: list[CalledTool]
    fault: CallFault | None = None


class Harmony(Dialect):
    """Messages with channels."""

    name = "harmony"
    reasoning_end = "<|end|>"

    def read(self, turn: str, *, tools: Tools, is_reasoning_open: bool) -> Reading:
        """Read a turn. The text has no markup, because templates refuse it in a message."""
        if _MESSAGE not in turn:
            return Reading(
                content=_MARKUP.sub("", turn), fault="unclosed" if _RECIPIENT.search(turn) and tools else None
            )
        read = _Turn(reasoning=[], content=[], calls=[])
        position = 0
        while position < len(turn):
            position = self._read_message(turn, position, read, with_tools=bool(tools))
        reasoning = "\n".join(read.reasoning) if read.reasoning else None
        marked = self.with_reasoning(reasoning, "") if reasoning else ""
        content = "\n".join(part for part in read.content if part)
        if read.fault not in (None, "unclosed", "in_reasoning"):
            return replace(self.read(turn, tools=(), is_reasoning_open=False), fault=read.fault)
        return Reading(
            content=content, reasoning=reasoning, marked_reasoning=marked, calls=tuple(read.calls), fault=read.fault
        )

    def _read_message(self, turn: str, start: int, read: _Turn, *, with_tools: bool) -> int:
        """Read one message into `read`; return where the next one starts."""
        header_end = turn.find(_MESSAGE, start)
        if header_end < 0:
            rest = _MARKUP.sub("", turn[start:])
            if rest.strip() and "to=" in rest:
                read.fault = "unclosed"
            return len(turn)
        header, body = turn[start:header_end], header_end + len(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and with_tools:
            try:
                return self._read_call(turn, body, recipient[1], read)
            except UnreadableCallError as error:
                read.fault = error.fault
        closing = _BODY_END.search(turn, body)
        end = len(turn) if closing is None else closing.start()
        channel = _CHANNEL.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis" and recipient is None
        if is_reasoning and with_tools and _CALL.search(turn, body, end):
            read.fault = read.fault or "in_reasoning"
        (read.reasoning if is_reasoning else read.content).append(turn[body:end])
        return self._next(turn, end)

    def _read_call(self, turn: str, body: int, recipient: str, read: _Turn) -> int:
        value, end = read_json(turn, body)
        end = skip_space(turn, end)
        if end < len(turn) and _BODY_END.match(turn, end) is None:
            raise UnreadableCallError("malformed")
        name = recipient.removeprefix(_FUNCTIONS)
        if not name:
            raise UnreadableCallError("no_name")
        read.calls.append(CalledTool(name=name, arguments=read_object(value)))
        return self._next(turn, end)

    def _next(self, turn: str, end: int) -> int:
        found = _HEADER_START.match(turn, end)
        return end if found is None else max(found.end(), min(end + 1, len(turn)))
