"""Converts a generated turn to the assistant message that the agent receives."""

from dataclasses import replace

from tree_rl.rollout.gateway.dialects.dialect import CallFault, Dialect, Tools
from tree_rl.rollout.gateway.options import Reasoning
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.call_format import OtherFormat


def read_message(
    text: str,
    *,
    tools: Tools,
    is_reasoning_open: bool,
    reasoning: Reasoning,
    key: str,
    dialect: Dialect,
    other_format: OtherFormat | None,
) -> tuple[ChatMessage, CallFault | None]:
    """Read a generated turn.

    Args:
        text: the turn without its end token.
        tools: tools that the request offered. Without tools, markup stays text.
        is_reasoning_open: True if the prompt ended inside reasoning.
        reasoning: `inline` leaves it in the text.
        key: makes the ids of tool calls unique in the session.
        other_format: the template's format of calls if the dialect does not read it.

    Returns:
        The message, and the fault of a call that stayed text. If one call is broken, the whole turn is text, as from a
        stock server; a last call that the turn's end cut off stays text after the calls before it.
    """
    turn = dialect.read(text, tools=tools, is_reasoning_open=is_reasoning_open)
    if other_format and not turn.calls and turn.fault is None and other_format.is_in(text, tools):
        turn = replace(turn, fault="other_format")
    calls = tuple(
        CalledTool(id=f"call_{key}_{index}", name=call.name, arguments=call.arguments, written_id=call.id)
        for index, call in enumerate(turn.calls)
    )
    thought, content = turn.reasoning, turn.content
    if reasoning == "inline":
        thought, content = None, turn.marked_reasoning + content
    elif thought is not None:
        content = content.strip()
    return ChatMessage(role="assistant", content=content, reasoning=thought, tool_calls=calls), turn.fault
