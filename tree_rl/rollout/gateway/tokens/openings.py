"""How a turn begins that the client has begun, or that must call a tool or be JSON.

The beginning is context: the model is given it, draws what follows, and only that is trained. Forced calls begin as the
chat template writes a call, whatever the family's format.
"""

from collections.abc import Sequence
from dataclasses import replace

from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.reasoning import THINK_START, opens_reasoning
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
    asked = messages[:-1] if request.continues_last else messages
    prompt = renderer.render(asked, tools=request.tools, is_prompt=True)
    if request.continues_last:
        begun = _begun(renderer, request, messages)
    elif request.must_call:
        begun = _before_arguments(renderer, request, messages)
    elif request.json is not None and opens_reasoning(prompt):
        begun = _before_text(renderer, request, messages)
    else:
        return prompt, ""
    # A template may open reasoning that a turn without any lacks.
    for header in (prompt, prompt.rstrip().removesuffix(THINK_START)):
        if begun.startswith(header):
            return begun, begun[len(header) :]
    field = "messages" if request.continues_last else "tool_choice" if request.must_call else "response_format"
    raise RequestError("the model's chat template cannot begin this turn as asked", field=field)


def shown_to_client(request: ChatRequest, message: ChatMessage) -> str:
    """The text of a turn without what the client itself began it with."""
    begun = request.messages[-1].content if request.continues_last else ""
    return message.content.removeprefix(begun if message.content.startswith(begun) else begun.strip())


def _begun(renderer: Renderer, request: ChatRequest, messages: Sequence[ChatMessage]) -> str:
    if messages[-1].tool_calls:
        raise RequestError("expected text to continue, received tool calls", field=f"messages[{len(messages) - 1}]")
    # Templates close a turn, and some trim it: what stands in front of more text is what the client sent.
    turns = [replace(messages[-1], content=messages[-1].content + more) for more in PROBES]
    return _alike(renderer, request, messages[:-1], turns)


def _before_arguments(renderer: Renderer, request: ChatRequest, messages: Sequence[ChatMessage]) -> str:
    """Up to a tool's name, or its arguments if only one may be called."""
    if len(request.must_call) == 1:
        calls = [(request.must_call[0], arguments) for arguments in ({}, {PROBES[0]: PROBES[1]})]
    else:
        calls = [(name, {}) for name in PROBES]
    turns = [
        ChatMessage(role="assistant", tool_calls=(CalledTool(id=CALL_ID, name=name, arguments=arguments),))
        for name, arguments in calls
    ]
    return _alike(renderer, request, messages, turns).rstrip(UNFINISHED)


def _before_text(renderer: Renderer, request: ChatRequest, messages: Sequence[ChatMessage]) -> str:
    return _alike(renderer, request, messages, [ChatMessage(role="assistant", content=text) for text in PROBES])


def _alike(
    renderer: Renderer, request: ChatRequest, messages: Sequence[ChatMessage], turns: Sequence[ChatMessage]
) -> str:
    """What two turns in one place have in common."""
    one, other = (renderer.render((*messages, turn), tools=request.tools, is_prompt=False) for turn in turns)
    different = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return one[: next(different, min(len(one), len(other)))]
