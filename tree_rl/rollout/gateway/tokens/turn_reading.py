"""From a generated turn to the assistant message that the agent receives.

`read_message` is the only reader of turns. A parser for another model family takes the place of `parse_tool_calls`.
"""

from tree_rl.rollout.gateway.options import Reasoning
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.reasoning import before_open_reasoning, split_reasoning
from tree_rl.rollout.gateway.tokens.tool_calls import parse_tool_calls


def read_message(
    text: str, *, parse_tools: bool, is_reasoning_open: bool, reasoning: Reasoning, key: str
) -> ChatMessage:
    """Read a generated turn.

    Args:
        text: the turn without its end token.
        parse_tools: whether the request offered tools. Without tools, markup stays text.
        is_reasoning_open: the prompt ended with `<think>`, so the turn begins inside its reasoning.
        reasoning: `inline` leaves it in the text.
        key: makes the ids of tool calls unique in the session.

    Returns:
        The message. If one tool call cannot be read, the whole turn comes as text, as from a stock server.
    """
    thought, visible = split_reasoning(text, is_open=is_reasoning_open)
    before = text[: len(text) - len(visible)]
    calls: tuple[CalledTool, ...] = ()
    parsed = parse_tool_calls(before_open_reasoning(visible)) if parse_tools else None
    if parsed is not None:
        visible, found = parsed
        calls = tuple(
            CalledTool(id=f"call_{key}_{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(found)
        )
    if reasoning == "inline":
        return ChatMessage(role="assistant", content=before + visible, tool_calls=calls)
    if thought is None:
        return ChatMessage(role="assistant", content=visible, tool_calls=calls)
    return ChatMessage(role="assistant", content=visible.strip(), reasoning=thought, tool_calls=calls)
