"""How a turn begins that the client has begun, or that must call a tool or be JSON.

The beginning is context: the model is given it, draws what follows, and only that is trained. Forced calls begin as the
chat template writes a call, whatever the family's format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Dialect
from tree_rl.rollout.gateway.dialects.reasoning import THINK_START
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.rendering import Renderer

UNFINISHED = " \t\n\"'{<("
"""Characters that the tokenizer joins with what follows. An opening that ended with one would force an odd spelling."""
PROBES = ("a0", "z9")
"""Names and texts that differ from their first character on."""
CALL_ID = "call00001"
"""Nine letters and digits: Mistral's templates take no other id."""


def opened_prompt(renderer: Renderer, request: ChatRequest, messages: Sequence[ChatMessage]) -> tuple[str, str]:
    """Write a request's prompt, up to the first token that the model draws.

    Args:
        messages: the request's, with the reasoning that clients drop.

    Returns:
        The text, and how much of its end belongs to the turn: its opening, empty for an ordinary prompt.

    Raises:
        RequestError: the template refuses the messages, or gives a forced turn no opening.
    """
    before = tuple(messages[:-1] if request.continues_last else messages)
    prompt = renderer.render(before, tools=request.tools, is_prompt=True)
    dialect = renderer.dialect
    turns = _turns(request, messages, is_reasoning_open=dialect.opens_reasoning(prompt))
    if turns is None:
        return prompt, ""
    # A template may begin an answer with reasoning, open or empty, and leave it out as soon as messages follow.
    headers = (prompt, prompt.removesuffix(renderer.dropped_opening), prompt.rstrip().removesuffix(THINK_START))
    for behind in _followers(turns[0]):
        try:
            written = [renderer.render((*before, one, *behind), tools=request.tools, is_prompt=False) for one in turns]
        except RequestError:
            continue
        begun = _common_beginning(*written)
        if request.must_call:
            begun = begun.rstrip(UNFINISHED)
        for header in headers if written[0] != written[1] else ():
            if begun.startswith(header):
                is_open = dialect.opens_reasoning(header)
                return begun, _without_empty_reasoning(begun[len(header) :], dialect, is_open=is_open)
    field = "messages" if request.continues_last else "tool_choice" if request.must_call else "response_format"
    raise RequestError("the model's chat template cannot begin this turn as asked", field=field)


def shown_to_client(request: ChatRequest, message: ChatMessage) -> str:
    """The text of a turn without what the client itself began it with."""
    begun = request.messages[-1].content if request.continues_last else ""
    return message.content.removeprefix(begun if message.content.startswith(begun) else begun.strip())


def _turns(
    request: ChatRequest, messages: Sequence[ChatMessage], *, is_reasoning_open: bool
) -> tuple[ChatMessage, ChatMessage] | None:
    """Two turns that part where the model is to go on; None if it begins by itself."""
    if request.continues_last:
        last = messages[-1]
        if last.tool_calls:
            raise RequestError("expected text to continue, received tool calls", field=f"messages[{len(messages) - 1}]")
        first, second = (replace(last, content=last.content + more) for more in PROBES)
        return first, second
    if request.must_call:
        name = request.must_call[0]
        is_named = len(request.must_call) == 1
        # Of several tools the model chooses one: up to the name. Of one: up to its arguments.
        if is_named:
            return _calling(name, {}), _calling(name, {PROBES[0]: PROBES[1]})
        return _calling(PROBES[0], {}), _calling(PROBES[1], {})
    if request.json is not None and is_reasoning_open:
        return ChatMessage(role="assistant", content=PROBES[0]), ChatMessage(role="assistant", content=PROBES[1])
    return None


def _calling(name: str, arguments: Mapping[str, Any]) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=(CalledTool(id=CALL_ID, name=name, arguments=arguments),))


def _followers(turn: ChatMessage) -> tuple[tuple[ChatMessage, ...], ...]:
    """What may follow a turn. In front of another message it stands as later prompts write it."""
    if turn.tool_calls:
        return (ChatMessage(role="tool", content="x", tool_call_id=CALL_ID),), ()
    return (ChatMessage(role="user", content="x"),), ()


def _without_empty_reasoning(opening: str, dialect: Dialect, *, is_open: bool) -> str:
    """An opening without the empty reasoning at its beginning, which the model did not think."""
    found = dialect.read(opening, tools=(), is_reasoning_open=is_open)
    return found.content.lstrip("\n") if found.reasoning == "" else opening


def _common_beginning(one: str, other: str) -> str:
    different = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return one[: next(different, min(len(one), len(other)))]
