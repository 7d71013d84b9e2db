"""What a dialect reads out of a turn, and what every dialect can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

CallFault = Literal[
    "unclosed", "malformed", "no_json", "no_name", "no_object", "in_reasoning", "other_format", "refused"
]
"""Why a call cannot be read. unclosed: the turn ends inside it. malformed: its markup is broken, or its arguments stand
where the family writes none. no_json: its arguments are no JSON. no_name: it names no tool. no_object: its arguments
are no JSON object. in_reasoning: it stands in reasoning that nothing visible follows; engines read the calls of some
families there, and so do we. other_format: it is written as the chat template does and the dialect does not. refused:
an engine's parser fails."""

Tools = Sequence[Mapping[str, Any]]
"""Function schemas in OpenAI's format."""


class UnreadableCallError(ValueError):
    """A tool call that cannot be read."""

    def __init__(self, fault: CallFault) -> None:
        super().__init__(fault)
        self.fault = fault


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCall:
    """A tool call, as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments in the model's order."""
    id: str | None = None
    """The id that the model gave it; None in families whose calls have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a turn says."""

    content: str
    """The text around the calls. With a fault, the whole visible text."""
    reasoning: str | None = None
    """None if there is none; empty if it is marked and empty."""
    opening: str = ""
    """The reasoning with its marks, as it stands in front of the visible text."""
    calls: tuple[WrittenCall, ...] = ()
    fault: CallFault | None = None
    """Why a call is left in the text; `in_reasoning` also where it was read."""


class Dialect(Protocol):
    """The way in which a family of models writes its turns."""

    @property
    def name(self) -> str:
        """By which options choose it."""

    @property
    def reasoning_end(self) -> str:
        """What closes reasoning."""

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, as templates of some models do."""

    def read(self, turn: str, *, tools: Tools, is_reasoning_open: bool) -> Reading:
        """Read a turn.

        Args:
            turn: without its end token.
            tools: offered to the model; without any, markup of calls stays text.
            is_reasoning_open: the prompt ended inside reasoning.
        """

    def with_reasoning(self, reasoning: str, content: str) -> str:
        """Reasoning in front of a message's text, for templates that have no field for it."""

    def call_id(self, sent: str, *, name: str, index: int) -> str:
        """The id of a call that the model did not write itself, as the family's templates expect it.

        Args:
            sent: as clients know it.
            name: of its tool.
            index: of the call in the conversation.
        """
