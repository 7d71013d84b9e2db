"""Texts and JSON values as clients may send them, requests of every protocol, and what reads them."""

from typing import Any

from hypothesis import strategies as st

from tree_rl.rollout.gateway.protocols import anthropic_messages, gemini, openai_chat, openai_responses

TEXTS = st.one_of(st.sampled_from(["", " a\n", "ü\u0301 名\U0001f40d", '"\n\\']), st.text(max_size=8))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), TEXTS),
    lambda part: st.one_of(st.lists(part, max_size=2), st.dictionaries(TEXTS, part, max_size=2)),
    max_leaves=4,
)
TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": True},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "spawn"}]},
]
NAMES = ("shell", "apply_patch", "agents__spawn")
READERS = {
    "chat": openai_chat.read_request,
    "messages": anthropic_messages.read_request,
    "responses": lambda body: openai_responses.read_request(body, openai_responses.StoredResponses()),
    "gemini": lambda body: gemini.read_request(body, model="m", is_stream=False, as_events=True),
}
"""A protocol's body -> the request."""
QUESTION = {"messages": [{"role": "user", "content": "q"}]}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {**QUESTION, "tools": [{"type": "function", "function": {"name": name}} for name in NAMES]},
    "messages": {
        **QUESTION,
        "max_tokens": 5,
        "tools": [{"name": n, "input_schema": {"type": "object"}} for n in NAMES],
    },
    "responses": {"model": "m", "input": "q", "tools": TOOLS},
    "gemini": {
        "contents": [{"role": "user", "parts": [{"text": "q"}]}],
        "tools": [{"functionDeclarations": [{"name": name} for name in NAMES]}],
    },
}
"""A question in every protocol, with the same tools."""


def asked(protocol: str, fields: Any) -> Any:
    """The body of a question with other fields, without those that are None."""
    return {name: value for name, value in {**ASKED[protocol], **fields}.items() if value is not None}
