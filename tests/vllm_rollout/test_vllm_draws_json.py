"""`json_output: enforce` with vLLM: a random model writes JSON of the schema alone; its log-probs are recorded."""

from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from verl_server import ask, user

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "is_ripe": {"type": "boolean"}},
    "required": ["colour", "is_ripe"],
    "additionalProperties": False,
}
WRITTEN = [f'{{"colour":"{one}","is_ripe":{other}}}' for one in ("red", "green") for other in ("true", "false")]
"""All that satisfies the schema, without white space."""


def test_every_protocol_gets_nothing_but_json_of_its_schema(served: SimpleNamespace) -> None:
    openai_format = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA, "strict": True}}
    plain_format = {"type": "json_schema", "schema": SCHEMA}

    async def talk(chat: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> list[str]:
        options: dict[str, Any] = {"model": "m", "messages": [user("which fruit?")], "max_tokens": 60}
        whole = await chat.chat.completions.create(**options, response_format=openai_format)
        chunks = await chat.chat.completions.create(**options, response_format=openai_format, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        response = await chat.responses.create(
            model="m", input="which fruit?", max_output_tokens=60, text={"format": {**plain_format, "name": "fruit"}}
        )
        block = (await messages.messages.create(**options, output_config={"format": plain_format})).content[-1]
        return [whole.choices[0].message.content, streamed, response.output_text, block.text]

    talked = ask(served, talk, json_output="enforce")
    for written in talked.result:
        # vLLM's grammar allows any white space, and a random model may write it up to its limit.
        assert any(whole.startswith("".join(written.split())) for whole in WRITTEN)
    assert talked.record.constrained == 4
    assert {(call.prompt_ids, call.response_ids, call.log_probs) for call in talked.record.calls} == {
        (one.prompt_ids, one.response_ids, one.log_probs) for one in talked.seen
    }
