"""An answer is, character for character, what the type of OpenAI's SDK would write."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from tree_rl.rollout.gateway.protocols import openai_chat
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Choice, Completion
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage

TEXTS = st.sampled_from(["", "a", "ü\u0301 名", "\ud800", '"\n\\'])
CALLS = st.lists(
    st.builds(CalledTool, id=TEXTS, name=TEXTS, arguments=st.one_of(TEXTS, st.just({"b": [1, None], "a": "ü"}))),
    max_size=3,
).map(tuple)
MESSAGES = st.builds(
    ChatMessage, role=st.just("assistant"), content=TEXTS, reasoning=st.one_of(st.none(), TEXTS), tool_calls=CALLS
)
TOKENS = st.lists(st.tuples(TEXTS.filter("\ud800".__ne__), st.floats(-9, 0)), max_size=3)
CHOICES = st.builds(
    Choice,
    message=MESSAGES,
    stop_cause=st.sampled_from(["stop", "length", "tool_calls", "stop_sequence"]),
    stop_sequence=st.none(),
    num_tokens=st.integers(0, 9),
    tokens=st.one_of(st.none(), TOKENS.map(tuple)),
)


@settings(max_examples=60)
@given(st.lists(CHOICES, min_size=1, max_size=3), TEXTS, st.booleans())
def test_an_answer_is_what_the_sdk_writes(choices: list[Choice], model: str, with_log_probs: bool) -> None:
    request = ChatRequest(model=model, messages=(), count=len(choices), with_log_probs=with_log_probs)
    completion = Completion(id="x", created=1, prompt_tokens=3, choices=tuple(choices))
    written = openai_chat.answer(request, completion)
    assert json.dumps(written) == json.dumps(
        ChatCompletion.model_validate(written).model_dump(mode="json", exclude_unset=True)
    )
