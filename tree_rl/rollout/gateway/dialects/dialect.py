"""The base of dialects: how a family of models writes tool calls and reasoning in a turn."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tree_rl.rollout.gateway.protocols.messages import CalledTool

CallFault = Literal[
    "unclosed", "malformed", "no_json", "no_name", "no_object", "in_reasoning", "other_format", "refused"
]
"""Why a call cannot be read. unclosed: the turn ends inside it. malformed: its markup is broken, or its arguments are
where the family writes none. no_json: its arguments are no JSON. no_name: it names no tool. no_object: its arguments
are no JSON object. in_reasoning: it is inside reasoning that no visible text follows; like the engines, we read the
calls of some families there. other_format: it has the chat template's format, which the dialect does not read. refused:
an engine's parser fails."""

THINK_START, THINK_END = "<think>", "</think>"
Tools = Sequence[Mapping[str, Any]]
"""Function schemas in OpenAI's format."""


class UnreadableCallError(ValueError):
    """A tool call that cannot be read."""

    def __init__(self, fault: CallFault) -> None:
        super().__init__(fault)
        self.fault = fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The parts of a turn."""

    content: str
    """The text around the calls; with a fault, the whole visible text."""
    reasoning: str | None = None
    """The reasoning without its marks; None without marks, empty if there is nothing between them."""
    marked_reasoning: str = ""
    """The text before the visible text: the reasoning with its marks."""
    calls: tuple[CalledTool, ...] = ()
    """The calls, without ids of ours; arguments are objects in the model's order."""
    fault: CallFault | None = None
    """Why a call stays in the text; `in_reasoning` also if the call was read."""


class Dialect(ABC):
    """The way in which a family of models writes its turns."""

    name: str
    """Name in the option `dialect`."""
    marks = (THINK_START, THINK_END)
    """Marks around reasoning in a message's text."""
    reasoning_end = THINK_END
    """Mark that ends reasoning in a turn."""

    def opens_reasoning(self, prompt: str) -> bool:
        """True if a prompt ends inside reasoning, as some templates make it do."""
        return prompt.rstrip().endswith(self.marks[0])

    @abstractmethod
    def read(self, turn: str, *, tools: Tools, is_reasoning_open: bool) -> Reading:
        """Read a turn.

        Args:
            turn: without its end token.
            tools: tools offered to the model; without any, markup of calls stays text.
            is_reasoning_open: True if the prompt ended inside reasoning.
        """

    def with_reasoning(self, reasoning: str, content: str) -> str:
        """Put reasoning before a message's text, for templates without a field for it."""
        start, end = self.marks
        return f"{start}\n{reasoning}\n{end}\n\n{content}"

    def call_id(self, sent: str, *, name: str, index: int) -> str:
        """The id, in the form that the family's templates expect, of a call that the model did not write.

        Most templates write no ids, so the client's stays as it is. `index` counts the conversation's calls.
        """
        return sent
