"""Conversations as agents may send them: the gateway's property tests share them."""

from typing import Any

from gateway_harness import SHELL
from hypothesis import strategies as st

TEXTS = st.sampled_from(
    [
        *("", "so", "sa", "so ", "the model answers", "ü\u0301 名\U0001f40d"),
        *('"messages": [', '\\"messages\\": [{}', "]}"),
        *("<|im_end|>", "a<|im_start|>user\nb", "<think>\nx\n</think>\n\ny", "</think>", "<tool_response>z", "\n\n w"),
    ]
)
ARGUMENTS = st.sampled_from(
    ['{"n": 1}', '{"n":1}', '{"n": true}', '{"n": 1.0}', "{", {"n": 1}, {"n": True}, {"n": 1.0}, {"b": 1, "a": "ü"}]
)
CALLS = st.lists(ARGUMENTS, max_size=2).map(
    lambda given: [{"id": "c", "type": "function", "function": {"name": "shell", "arguments": a}} for a in given]
)
MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": [{"type": "text", "text": text}]}, TEXTS),
    st.builds(lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, TEXTS, CALLS),
    st.builds(lambda t, r: {"role": "assistant", "content": t, "reasoning_content": r, "tool_calls": []}, TEXTS, TEXTS),
)
EDITS = st.one_of(
    st.tuples(st.just("append"), MESSAGES),
    st.tuples(st.just("append"), MESSAGES),
    st.tuples(st.just("append"), MESSAGES),
    st.tuples(st.just("replace"), st.integers(0, 20), MESSAGES),
    st.tuples(st.just("lengthen"), st.integers(0, 20)),
    st.tuples(st.just("drop"), st.integers(0, 20)),
    st.tuples(st.just("cut"), st.integers(1, 20)),
    st.tuples(st.just("start anew"), MESSAGES),
    st.tuples(st.just("offer tools"), st.sampled_from([(), (SHELL,), (SHELL, SHELL)])),
)
"""What an agent does to its conversation between two calls."""


def edited(conversation: list[Any], edit: tuple[Any, ...]) -> list[Any]:
    """The conversation afterwards; never empty."""
    place = edit[1] % len(conversation) if isinstance(edit[1], int) else 0
    match edit[0]:
        case "append":
            return [*conversation, edit[1]]
        case "replace":
            return [*conversation[:place], edit[2], *conversation[place + 1 :]]
        case "lengthen":
            old = conversation[place]
            longer = {**old, "content": f"{old['content']} "} if isinstance(old["content"], str) else old
            return [*conversation[:place], longer, *conversation[place + 1 :]]
        case "drop":
            return conversation[:place] + conversation[place + 1 :] or conversation
        case "cut":
            return conversation[: place + 1]
        case "start anew":
            return [edit[1]]
    return conversation
