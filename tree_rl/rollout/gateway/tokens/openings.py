"""The opening of a turn that the client started, or that must call a tool or be JSON.

The opening is context: the model samples what follows, and only that is trained. The opening of a forced call comes
from the chat template, so it has the family's format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import THINK_START, Dialect
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.call_format import CALL_ID, common_prefix
from tree_rl.rollout.gateway.tokens.rendering import Renderer

UNFINISHED = " \t\n\"'{<("
"""Characters that the tokenizer joins with following text. Ending an opening with one would force unusual tokens."""
PROBES = ("a0", "z9")
"""Two names or texts that differ from their first character."""


def opened_prompt(renderer: Renderer, request: ChatRequest, messages: Sequence[ChatMessage]) -> tuple[str, str]:
    """Render a request's prompt, up to the first token that the model samples.

    Args:
        messages: the request's messages, with the reasoning that clients drop.

    Returns:
        The text, and its end that belongs to the turn: the opening, empty for an ordinary prompt.

    Raises:
        RequestError: the template refuses the messages, or has no opening for a forced turn.
    """
    before = tuple(messages[:-1] if request.continues_last else messages)
    prompt = renderer.render(before, tools=request.tools, is_prompt=True)
    dialect = renderer.dialect
    turns = _turns(request, messages, is_reasoning_open=dialect.opens_reasoning(prompt))
    if turns is None:
        return prompt, ""
    # A template may start an answer with open or empty reasoning, and drop it when messages follow.
    headers = (prompt, prompt.removesuffix(renderer.dropped_opening), prompt.rstrip().removesuffix(THINK_START))
    for after in _followers(turns[0], dialect):
        try:
            written = [renderer.render((*before, one, *after), tools=request.tools, is_prompt=False) for one in turns]
        except RequestError:
            continue
        shared = common_prefix(*written)
        if request.must_call:
            shared = shared.rstrip(UNFINISHED)
        for header in headers if written[0] != written[1] else ():
            if shared.startswith(header):
                is_open = dialect.opens_reasoning(header)
                return shared, _without_empty_reasoning(shared[len(header) :], dialect, is_open=is_open)
    field = "messages" if request.continues_last else "tool_choice" if request.must_call else "response_format"
    raise RequestError("the model's chat template cannot begin this turn as asked", field=field)


def shown_to_client(request: ChatRequest, message: ChatMessage, *, opening: str, dialect: Dialect) -> ChatMessage:
    """A turn without the text and the reasoning with which the client began it."""
    if not request.continues_last:
        return message
    content, start = message.content, request.messages[-1].content
    if not content.startswith(start):
        content, start = content.lstrip(), start.strip()
    reasoning = None if dialect.reasoning_end in opening else message.reasoning
    return replace(message, content=content.removeprefix(start), reasoning=reasoning)


def _turns(
    request: ChatRequest, messages: Sequence[ChatMessage], *, is_reasoning_open: bool
) -> tuple[ChatMessage, ChatMessage] | None:
    """Two turns whose common prefix is the opening; None if the turn needs no opening."""
    if request.continues_last:
        if request.must_call:
            raise RequestError("expected no forced call in an answer that the client began", field="tool_choice")
        last = messages[-1]
        if last.tool_calls:
            raise RequestError("expected text to continue, received tool calls", field=f"messages[{len(messages) - 1}]")
        first, second = (replace(last, content=last.content + more) for more in PROBES)
        return first, second
    if request.must_call:
        name = request.must_call[0]
        is_named = len(request.must_call) == 1
        # With several tools the opening ends before the name, with one tool before its arguments.
        if is_named:
            return _calling(name, {}), _calling(name, {PROBES[0]: PROBES[1]})
        return _calling(PROBES[0], {}), _calling(PROBES[1], {})
    if request.json is not None and is_reasoning_open:
        return ChatMessage(role="assistant", content=PROBES[0]), ChatMessage(role="assistant", content=PROBES[1])
    return None


def _calling(name: str, arguments: Mapping[str, Any]) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=(CalledTool(id=CALL_ID, name=name, arguments=arguments),))


def _followers(turn: ChatMessage, dialect: Dialect) -> tuple[tuple[ChatMessage, ...], ...]:
    """Messages to render after a turn: before another message it has the form of later prompts, but no reasoning."""
    if turn.tool_calls:
        return (ChatMessage(role="tool", content="x", tool_call_id=CALL_ID),), ()
    followed = (ChatMessage(role="user", content="x"),)
    has_reasoning = turn.reasoning or dialect.marks[1] in turn.content
    return ((), followed) if has_reasoning else (followed, ())


def _without_empty_reasoning(opening: str, dialect: Dialect, *, is_open: bool) -> str:
    """Remove the template's empty reasoning from the start of an opening."""
    found = dialect.read(opening, tools=(), is_reasoning_open=is_open)
    return found.content.lstrip("\n") if found.reasoning == "" else opening
