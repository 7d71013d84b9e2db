"""From generated text to the assistant message that an agent receives."""

from tree_rl.rollout.chat import THINK_END, THINK_START
from tree_rl.rollout.gateway.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.options import Reasoning
from tree_rl.rollout.tool_calls import parse_turn


def read_message(
    text: str, *, parse_tools: bool, is_reasoning_open: bool, reasoning: Reasoning, key: str
) -> ChatMessage:
    """Read a generated turn.

    Args:
        text: the turn, its end token removed.
        parse_tools: whether the request offered tools; without any, markup stays text.
        is_reasoning_open: the prompt ended with `<think>`, so the turn begins inside its reasoning.
        reasoning: `inline` leaves it in the text.
        key: makes the ids of tool calls unique in the session.

    Returns:
        The message. A turn with a tool call that cannot be read comes as text alone, as from a stock server, and what
        the agent does about it is its own affair.
    """
    thought, visible = _split_reasoning(text, is_open=is_reasoning_open)
    before = text[: len(text) - len(visible)]
    calls: tuple[CalledTool, ...] = ()
    if parse_tools:
        turn = parse_turn(visible)
        readable = [call for call in turn.calls if call is not None]
        if readable and len(readable) == len(turn.calls):
            visible = turn.text
            calls = tuple(
                CalledTool(id=f"call_{key}_{index}", name=call.name, arguments=dict(call.arguments))
                for index, call in enumerate(readable)
            )
    if reasoning == "inline":
        return ChatMessage(role="assistant", content=before + visible, tool_calls=calls)
    if thought is None:
        return ChatMessage(role="assistant", content=visible, tool_calls=calls)
    return ChatMessage(role="assistant", content=visible.strip(), reasoning=thought, tool_calls=calls)


def _split_reasoning(text: str, *, is_open: bool) -> tuple[str | None, str]:
    """The reasoning without its tags (None if there is none), and the text after it, a suffix of `text`.

    Reasoning that was never closed is all there is.
    """
    if THINK_END in text:
        thought, visible = text.rsplit(THINK_END, 1)
    elif is_open or text.lstrip().startswith(THINK_START):
        thought, visible = text, ""
    else:
        return None, text
    return thought.split(THINK_START, 1)[-1].strip("\n"), visible
