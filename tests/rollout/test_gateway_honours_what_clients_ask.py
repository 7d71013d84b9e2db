"""What clients ask of an answer's form is honoured, and every row still holds the drawn tokens in their own context."""

import asyncio
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_harness import SHELL, TinyModel, check_record, run_session, serving, trained_text

from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

HELLO = [{"role": "user", "content": "hello"}]
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"command": "ls"}}\n</tool_call>'


def scripted(tiny: SimpleNamespace, *turns: str) -> TinyModel:
    """A model that writes these turns, whatever it is asked."""
    left = iter(turns)
    return TinyModel(tiny.model, tiny.tokenizer, lambda prompt: next(left))


def anthropic_session(backend: TinyModel, play: Any, **options: Any) -> RecordedSession:
    async def run() -> RecordedSession:
        async with serving(backend, backend.tokenizer, **options) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as client:
                await play(client)
            return await gateway.close_session(session)

    record = asyncio.run(run())
    check_record(backend, record)
    return record


@pytest.mark.parametrize(
    ("choice", "drawn", "opening"),
    [
        (
            {"type": "function", "function": {"name": "shell"}},
            ' {"command": "ls"}}\n</tool_call>',
            '<tool_call>\n{"name": "shell", "arguments":',
        ),
        ("required", ' "shell", "arguments": {"command": "ls"}}\n</tool_call>', '<tool_call>\n{"name":'),
    ],
)
def test_a_forced_call_is_begun_for_the_model_and_only_what_it_drew_is_trained(
    tiny: SimpleNamespace, choice: Any, drawn: str, opening: str
) -> None:
    backend = scripted(tiny, drawn, "done")
    messages: list[Any] = list(HELLO)

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        tools = [SHELL, READ]
        answer = await chat.chat.completions.create(model="m", messages=messages, tools=tools, tool_choice=choice)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and not message.content
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("shell", '{"command": "ls"}')
        ]
        messages.append(message.model_dump())
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"})
        await chat.chat.completions.create(model="m", messages=messages, tools=tools)

    record = run_session(backend, play)
    assert tiny.tokenizer.decode(record.calls[0].prompt_ids).endswith(opening)
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row) == f"{drawn}<|im_end|>done<|im_end|>"
    assert record.drift.left == ()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "shell"}])
def test_anthropics_forced_calls_are_forced_too(tiny: SimpleNamespace, choice: Any) -> None:
    arguments = ' {"command": "ls"}}\n</tool_call>'
    backend = scripted(tiny, arguments if choice["type"] == "tool" else f' "shell", "arguments":{arguments}')

    async def play(client: anthropic.AsyncAnthropic) -> None:
        tool = {"name": "shell", "input_schema": {"type": "object"}}
        other = {"name": "read", "input_schema": {"type": "object"}}
        options = {"model": "m", "max_tokens": 200, "messages": HELLO, "tools": [tool, other], "tool_choice": choice}
        async with client.messages.stream(**options) as stream:
            answer = await stream.get_final_message()
        (block,) = answer.content
        assert (block.type, block.name, block.input, answer.stop_reason) == (
            "tool_use",
            "shell",
            {"command": "ls"},
            "tool_use",
        )

    anthropic_session(backend, play)


def test_a_forced_call_stands_where_the_template_opens_reasoning(tiny: SimpleNamespace) -> None:
    template = tiny.tokenizer.chat_template + "{%- if add_generation_prompt %}{{ '<think>\\n' }}{%- endif %}"
    tokenizer = SimpleNamespace(tokenizer=tiny.tokenizer, model=tiny.model)
    backend = scripted(tokenizer, ' {"command": "ls"}}\n</tool_call>')
    before, backend.tokenizer.chat_template = backend.tokenizer.chat_template, template

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        choice = {"type": "function", "function": {"name": "shell"}}
        answer = await chat.chat.completions.create(model="m", messages=HELLO, tools=[SHELL], tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "shell"

    try:
        record = run_session(backend, play)
    finally:
        tiny.tokenizer.chat_template = before
    text = tiny.tokenizer.decode(record.calls[0].prompt_ids)
    assert text.endswith('<|im_start|>assistant\n<tool_call>\n{"name": "shell", "arguments":')


def test_a_template_without_calls_refuses_to_force_one(tiny: SimpleNamespace) -> None:
    before, tiny.tokenizer.chat_template = (
        tiny.tokenizer.chat_template,
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="tool_choice: the model's chat template cannot begin"):
            await chat.chat.completions.create(model="m", messages=HELLO, tools=[SHELL], tool_choice="required")

    try:
        run_session(scripted(tiny), play)
    finally:
        tiny.tokenizer.chat_template = before


@pytest.mark.parametrize("sends", [{"parallel_tool_calls": False}, {}])
def test_one_call_ends_the_turn_behind_it_and_the_row_goes_on(tiny: SimpleNamespace, sends: dict[str, Any]) -> None:
    both = f"Look.\n{CALL % 'shell'}\n{CALL % 'read'}"
    backend = scripted(tiny, both, "done")
    messages: list[Any] = list(HELLO)

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        answer = await chat.chat.completions.create(model="m", messages=messages, tools=[SHELL, READ], **sends)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert len(message.tool_calls) == (1 if sends else 2)
        messages.append(message.model_dump())
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a.py"})
        await chat.chat.completions.create(model="m", messages=messages, tools=[SHELL, READ], **sends)

    record = run_session(backend, play)
    (row,) = rows_of_calls(record.calls)
    first = f"Look.\n{CALL % 'shell'}" if sends else f"{both}<|im_end|>"
    assert trained_text(tiny.tokenizer, row) == f"{first}done<|im_end|>"
    assert record.drift.left == ()


def test_anthropics_disable_parallel_tool_use_is_the_same(tiny: SimpleNamespace) -> None:
    backend = scripted(tiny, f"{CALL % 'shell'}\n{CALL % 'shell'}")

    async def play(client: anthropic.AsyncAnthropic) -> None:
        answer = await client.messages.create(
            model="m",
            max_tokens=300,
            messages=HELLO,
            tools=[{"name": "shell", "input_schema": {"type": "object"}}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        assert [block.type for block in answer.content] == ["tool_use"]

    record = anthropic_session(backend, play)
    assert tiny.tokenizer.decode(record.calls[0].response_ids) == CALL % "shell"


def test_allowed_tools_are_the_only_ones_offered(tiny: SimpleNamespace) -> None:
    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "read"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        await chat.chat.completions.create(model="m", messages=HELLO, tools=[SHELL, READ], tool_choice=choice)

    record = run_session(scripted(tiny, "hi"), play)
    text = tiny.tokenizer.decode(record.calls[0].prompt_ids)
    assert '"read"' in text and '"shell"' not in text


@pytest.mark.parametrize("begun", ["The answer is", "i", "Sum: ", "<tool"])
def test_a_last_assistant_message_is_continued_and_its_row_goes_on(tiny: SimpleNamespace, begun: str) -> None:
    backend = scripted(tiny, " forty-two.", "bye")

    async def play(client: anthropic.AsyncAnthropic) -> None:
        answer = await client.messages.create(
            model="m", max_tokens=50, messages=[*HELLO, {"role": "assistant", "content": begun}]
        )
        assert answer.content[0].text == " forty-two."
        whole = {"role": "assistant", "content": begun + answer.content[0].text}
        await client.messages.create(
            model="m", max_tokens=50, messages=[*HELLO, whole, {"role": "user", "content": "bye"}]
        )

    record = anthropic_session(backend, play)
    assert tiny.tokenizer.decode(record.calls[0].prompt_ids).endswith(begun)
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row) == " forty-two.<|im_end|>bye<|im_end|>"


def test_continue_final_message_continues_and_without_it_a_new_turn_begins(tiny: SimpleNamespace) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        answer = await chat.chat.completions.create(
            model="m", messages=messages, extra_body={"continue_final_message": True}
        )
        assert answer.choices[0].message.content == " is here"
        await chat.chat.completions.create(model="m", messages=messages)

    record = run_session(scripted(tiny, " is here", "again"), play)
    texts = [tiny.tokenizer.decode(call.prompt_ids) for call in record.calls]
    assert texts[0].endswith("The answer") and texts[1].endswith("<|im_start|>assistant\n")


def test_images_and_documents_become_a_line_and_the_record_says_so(tiny: SimpleNamespace) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    pdf = {
        "type": "document",
        "title": "a.pdf",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
    }
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain words"}}
    found = {
        "type": "search_result",
        "source": "https://a.b",
        "title": "t",
        "content": [{"type": "text", "text": "hit"}],
    }
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image, {"type": "text", "text": "seen"}]}
    use = {"type": "tool_use", "id": "x", "name": "shell", "input": {}}

    async def play(client: anthropic.AsyncAnthropic) -> None:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "look"}, image, pdf, plain, found]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(model="m", max_tokens=20, messages=messages)

    record = anthropic_session(scripted(tiny, "I see"), play)
    text = tiny.tokenizer.decode(record.calls[0].prompt_ids)
    assert text.count("[image left out: this model reads text alone]") == 2
    assert "[document: a.pdf left out: this model reads text alone]" in text
    assert "plain words" in text and "hit" in text
    assert dict(record.left_out) == {"image": 1, "document": 1}


def test_openai_images_and_unknown_fields_are_named_in_the_record(tiny: SimpleNamespace) -> None:
    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        content = [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        ]
        await chat.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], extra_body={"sparkle": 3}
        )

    record = run_session(scripted(tiny, "I see"), play)
    assert dict(record.left_out) == {"image": 1, "field sparkle": 1}


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def test_instruct_writes_the_schema_into_the_system_text(tiny: SimpleNamespace) -> None:
    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        messages = [{"role": "system", "content": "Be kind."}, *HELLO]
        await chat.chat.completions.create(model="m", messages=messages, response_format=FORMAT)
        await chat.chat.completions.create(model="m", messages=HELLO, response_format={"type": "text"})

    record = run_session(scripted(tiny, '{"answer": 5}', "hi"), play, json_output="instruct")
    first, second = (tiny.tokenizer.decode(call.prompt_ids) for call in record.calls)
    assert "Be kind.\n\nAnswer with JSON alone" in first and '"required": ["answer"]' in first
    assert "JSON" not in second and record.constrained == 0


def test_enforce_gives_the_server_the_schema_in_one_request(tiny: SimpleNamespace) -> None:
    asked: list[dict[str, Any]] = []
    backend = scripted(tiny, '{"answer": 5}')
    generate = backend.generate

    async def noted(prompt_ids: Any, **options: Any) -> Any:
        asked.append(options)
        return await generate(prompt_ids, **options)

    backend.generate = noted  # type: ignore[method-assign]

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        await chat.chat.completions.create(model="m", messages=HELLO, response_format=FORMAT, stop=["zzz"])
        with pytest.raises(openai.BadRequestError, match="expected no tools beside it"):
            await chat.chat.completions.create(model="m", messages=HELLO, response_format=FORMAT, tools=[SHELL])

    record = run_session(backend, play, json_output="enforce")
    (one,) = asked
    assert one["sampling"]["json_schema"] == SCHEMA and one["max_tokens"] == 400
    assert record.constrained == 1


def test_refused_requests_leave_the_session_usable(tiny: SimpleNamespace) -> None:
    async def run() -> list[int]:
        async with serving(scripted(tiny, "hi"), tiny.tokenizer) as gateway:
            endpoint = gateway.endpoint(gateway.open_session())
            async with httpx.AsyncClient(headers={"x-api-key": endpoint.token}) as client:
                url = endpoint.url + "/v1/messages"
                body = {"max_tokens": 5, "messages": HELLO}
                forced = {**body, "output_format": {"type": "json_schema", "schema": SCHEMA}}
                return [(await client.post(url, json=one)).status_code for one in (forced, body)]

    assert asyncio.run(run()) == [400, 200]
