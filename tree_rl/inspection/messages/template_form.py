"""Tries out a chat template: in which form it expects messages, and what it writes around turns."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from tree_rl.inspection.messages.json_cells import decoded
from tree_rl.inspection.messages.roles import ASSISTANT

REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors of a template for messages that it does not expect; jinja does not wrap errors in expressions."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PROBE = "tree-probe"
ASKED = {"role": "user", "content": "x"}

Render = Callable[[Sequence[dict[str, Any]]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateForm:
    """The form of messages that a template expects."""

    source: str = ""
    """Source of the template, which has its role names in quotes."""
    takes_text: bool = True
    """True if arguments of calls may be JSON text, which the template copies."""
    takes_objects: bool = True
    """True if arguments of calls may be objects, which the template writes as JSON."""
    reasoning_field: str | None = None
    """Field for reasoning; None: it has no field and goes into the text."""

    @classmethod
    def of(cls, source: str, render: Render) -> "TemplateForm":
        """Try a template out; `render` raises one of `REFUSALS` for messages that the template refuses."""

        def written(**turn: Any) -> str | None:
            try:
                return render([ASKED, {"role": "assistant", "content": "", **turn}])
            except REFUSALS:
                return None

        text, thing = (
            written(tool_calls=[{"type": "function", "id": "call00001", "function": {"name": "f", "arguments": one}}])
            for one in (json.dumps({PROBE: "y"}), {PROBE: "y"})
        )
        # A template that expects text prints an object in Python syntax; one that expects objects quotes text as JSON.
        takes_objects = thing is not None and f"'{PROBE}'" not in thing
        fields = [name for name in REASONING_FIELDS if PROBE in (written(content="y", **{name: PROBE}) or "")]
        return cls(
            source=source,
            takes_text=text is not None and (text == thing or not takes_objects),
            takes_objects=takes_objects,
            reasoning_field=fields[0] if fields else None,
        )

    def fitted(self, message: dict[str, Any], thoughts: Sequence[str]) -> dict[str, Any]:
        """A message with arguments and reasoning in the form that the template expects."""
        whole = dict(message)
        if calls := whole.get("tool_calls"):
            whole["tool_calls"] = [self._call(call) for call in calls]
        if reasoning := "\n".join(thoughts):
            if self.reasoning_field is not None:
                whole[self.reasoning_field] = reasoning
            elif isinstance(whole["content"], str):
                whole["content"] = f"<think>\n{reasoning}\n</think>\n\n{whole['content']}"
        elif self.reasoning_field is not None and whole["role"] == ASSISTANT and not whole.get(self.reasoning_field):
            # Servers and data sets differ in the name; the template drops all but its own.
            others = [name for name in REASONING_FIELDS if whole.get(name) and isinstance(whole[name], str)]
            if others:
                whole[self.reasoning_field] = whole.pop(others[0])
        return whole

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and not self.takes_text:
            arguments = decoded(arguments)
        elif not isinstance(arguments, str) and not self.takes_objects and self.takes_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEdges:
    """Text that a template writes around an assistant's turn; empty if the template refuses the trial."""

    opening: str = ""
    """Text after a prompt that asks for the turn."""
    header: str = ""
    """Beginning of `opening` that a completed turn keeps."""
    closing: str = ""
    """Text after the content of a turn."""

    @classmethod
    def of(cls, render: Callable[..., str]) -> "TurnEdges":
        """Try a template out; `render` takes messages, and `ask=True` to append the opening."""
        answered = [ASKED, {"role": "assistant", "content": PROBE}]
        try:
            base, asked = render([ASKED]), render([ASKED], ask=True)
            last, followed = render(answered), render([*answered, ASKED])
        except REFUSALS:
            return cls()
        opening = asked.removeprefix(base) if asked.startswith(base) else ""
        lead = followed[len(base) : followed.find(PROBE)] if PROBE in followed else ""
        shared = [index for index in range(len(opening) + 1) if lead.startswith(opening[:index])]
        return cls(opening=opening, header=opening[: shared[-1]], closing=last.partition(PROBE)[2])
