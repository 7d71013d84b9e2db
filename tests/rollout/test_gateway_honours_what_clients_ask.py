"""What clients ask of an answer's form is honoured, and every row still holds the drawn tokens in their own context.

What they do besides: packed bodies, probes, a tool runner. Each is answered, or refused by name.
"""

import gzip
import json
import zlib
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from gateway_harness import CHATML, SHELL, TinyModel, build_tokenizer, talking, tool_result, trained_texts, user
from protocol_turns import call

HELLO = [user("hello")]
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
LS = call("shell", command="ls")
FORCE_SHELL = {"type": "function", "function": {"name": "shell"}}
FORCED = '<tool_call>\n{"name": "shell", "arguments":'
NAMED, ANY = ' {"command": "ls"}}\n</tool_call>', ' "shell", "arguments": {"command": "ls"}}\n</tool_call>'
OPENS = "{%- if add_generation_prompt %}{{ '<think>\\n' }}{%- endif %}"


@pytest.mark.parametrize(
    ("choice", "drawn", "opening", "template"),
    [
        (FORCE_SHELL, NAMED, FORCED, ""),
        ("required", ANY, '<tool_call>\n{"name":', ""),
        (FORCE_SHELL, NAMED, f"<|im_start|>assistant\n{FORCED}", OPENS),
    ],
    ids=["named", "any", "named where the template opens reasoning"],
)
async def test_a_forced_call_is_begun_for_the_model_and_only_what_it_drew_is_trained(
    tiny: SimpleNamespace, choice: Any, drawn: str, opening: str, template: str
) -> None:
    turns = iter((drawn, "done"))
    tokenizer = build_tokenizer(tiny.tokenizer.chat_template + template)
    async with talking(TinyModel(tiny.model, tokenizer, lambda _: next(turns))) as talk:
        answer = await talk.ask("hello", tools=[SHELL, READ], tool_choice=choice)
        message = answer.choices[0].message
        sent = [*HELLO, message.model_dump(), tool_result(message, "a.py")]
        await talk.ask(sent, tools=[SHELL, READ])
    assert answer.choices[0].finish_reason == "tool_calls" and not message.content
    called = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert called == [("shell", '{"command": "ls"}')]
    assert tokenizer.decode(talk.record.calls[0].prompt_ids).endswith(opening)
    assert trained_texts(tokenizer, talk.record.calls) == [f"{drawn}<|im_end|>done<|im_end|>"]
    assert talk.record.drift.branch_causes == {}


async def test_a_call_that_cannot_be_begun_is_refused(tiny: SimpleNamespace) -> None:
    """By a template without calls, and behind a begun answer."""
    async with talking(TinyModel(tiny.model, build_tokenizer(CHATML))) as talk:
        with pytest.raises(openai.BadRequestError, match="tool_choice: the model's chat template cannot begin"):
            await talk.ask("hello", tools=[SHELL], tool_choice="required")
    tool = {"name": "shell", "input_schema": SHELL["function"]["parameters"]}
    messages = [*HELLO, {"role": "assistant", "content": "I say"}]
    async with talking(tiny.backend()) as talk:
        for choice in ({"type": "any"}, {"type": "tool", "name": "shell"}):
            with pytest.raises(anthropic.BadRequestError, match="tool_choice: expected no forced call"):
                options = {"messages": messages, "tools": [tool], "tool_choice": choice}
                await talk.anthropic.messages.create(model="m", max_tokens=50, **options)


@pytest.mark.parametrize("sends", [{"parallel_tool_calls": False}, {}])
async def test_one_call_ends_the_turn_behind_it_and_the_row_goes_on(
    tiny: SimpleNamespace, sends: dict[str, Any]
) -> None:
    both = f"Look.\n{LS}\n{call('read', command='ls')}"
    async with talking(tiny.scripted(both, "done")) as talk:
        answer = await talk.ask("hello", tools=[SHELL, READ], **sends)
        message = answer.choices[0].message
        results = [tool_result(message, "a.py", index) for index in range(len(message.tool_calls))]
        await talk.ask([*HELLO, message.model_dump(), *results], tools=[SHELL, READ], **sends)
    assert (answer.choices[0].finish_reason, len(results)) == ("tool_calls", 1 if sends else 2)
    first = f"Look.\n{LS}" if sends else f"{both}<|im_end|>"
    assert trained_texts(tiny.tokenizer, talk.record.calls) == [f"{first}done<|im_end|>"]
    assert talk.record.drift.branch_causes == {}


@pytest.mark.parametrize("begun", ["The answer is", "i", "Sum: ", "<tool"])
async def test_a_last_assistant_message_is_continued_and_its_row_goes_on(tiny: SimpleNamespace, begun: str) -> None:
    async with talking(tiny.scripted(" forty-two.", "bye")) as talk:
        create = talk.anthropic.messages.create
        answer = await create(model="m", max_tokens=50, messages=[*HELLO, {"role": "assistant", "content": begun}])
        whole = {"role": "assistant", "content": begun + answer.content[0].text}
        await create(model="m", max_tokens=50, messages=[*HELLO, whole, user("bye")])
    assert answer.content[0].text == " forty-two."
    assert tiny.tokenizer.decode(talk.record.calls[0].prompt_ids).endswith(begun)
    assert trained_texts(tiny.tokenizer, talk.record.calls) == [" forty-two.<|im_end|>bye<|im_end|>"]


@pytest.mark.parametrize("reasoning", ["field", "inline"])
@pytest.mark.parametrize("thought", ["", "<think>\nsum up\n</think>\n\n"])
async def test_an_answer_cut_by_its_limit_is_continued_in_its_row_where_that_is_asked(
    tiny: SimpleNamespace, thought: str, reasoning: str
) -> None:
    cut = tiny.tokenizer.encode(f"{thought}The answer")
    async with talking(tiny.scripted(cut, " is here", "again"), reasoning=reasoning) as talk:
        first = await talk.ask("hello", max_tokens=len(cut))
        begun = {"role": "assistant", "content": first.choices[0].message.content}
        answer = await talk.ask([*HELLO, begun], extra_body={"continue_final_message": True})
        await talk.ask([*HELLO, begun])
    *calls, unasked = talk.record.calls
    message = answer.choices[0].message
    assert tiny.tokenizer.decode(unasked.prompt_ids).endswith("The answer<|im_end|>\n<|im_start|>assistant\n")
    assert (message.content, getattr(message, "reasoning_content", None)) == (" is here", None)
    assert trained_texts(tiny.tokenizer, calls) == [f"{thought}The answer is here<|im_end|>"]


async def test_a_begun_answer_is_not_shown_again_behind_a_line_break(tiny: SimpleNamespace) -> None:
    template = tiny.tokenizer.chat_template.replace("'<think>\\n' +", "'\\n<think>\\n' +")
    begun = {"role": "assistant", "content": "<think>\nsum up\n</think>\n\nThe answer"}
    backend = TinyModel(tiny.model, build_tokenizer(template), lambda prompt: " is here")
    async with talking(backend, reasoning="inline") as talk:
        answer = await talk.ask([*HELLO, begun], extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == " is here"


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


async def test_instruct_writes_the_schema_into_the_system_text(tiny: SimpleNamespace) -> None:
    async with talking(tiny.scripted('{"answer": 5}', "hi", '{"answer": 5}'), json_output="instruct") as talk:
        await talk.ask([{"role": "system", "content": "Be kind."}, *HELLO], response_format=FORMAT)
        await talk.ask("hello", response_format={"type": "text"})
        await talk.ask("hello", response_format=FORMAT)
    first, second, third = (tiny.tokenizer.decode(call.prompt_ids) for call in talk.record.calls)
    assert "Be kind.\n\nAnswer with JSON alone" in first and '"required": ["answer"]' in first
    assert "JSON" not in second and talk.record.constrained == 0
    assert third.startswith("<|im_start|>system\nAnswer with JSON alone")


async def test_enforce_gives_the_server_the_schema_in_one_request(tiny: SimpleNamespace) -> None:
    backend = tiny.scripted('{"answer": 5}')
    async with talking(backend, json_output="enforce") as talk:
        await talk.ask("hello", response_format=FORMAT, stop=["zzz"])
        with pytest.raises(openai.BadRequestError, match="expected no tools: an answer"):
            await talk.ask("hello", response_format=FORMAT, tools=[SHELL])
    (one,) = backend.samplings
    assert one["json_schema"] == SCHEMA and one["max_tokens"] == 400
    assert talk.record.constrained == 1


CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": HELLO, "max_tokens": 3}).encode()
GZIPPED = gzip.compress(BODY, mtime=0)


async def test_packed_bodies_are_the_plain_ones(tiny: SimpleNamespace) -> None:
    bodies = {"identity": BODY, "gzip": GZIPPED, "GZIP": GZIPPED, "deflate": zlib.compress(BODY)}
    sent = [*bodies.items(), ("identity", b"\xef\xbb\xbf" + BODY)]
    async with talking(tiny.scripted(*["hi"] * 5)) as talk:
        for encoding, body in sent:
            answer = await talk.http.post(CHAT, content=body, headers={"content-encoding": encoding})
            assert answer.status_code == 200, answer.text
    assert len(talk.record.calls) == 5 and len({call.prompt_ids for call in talk.record.calls}) == 1


@pytest.mark.parametrize(
    ("encoding", "body", "status", "message"),
    [
        ("br", BODY, 415, "content-encoding: expected gzip, x-gzip, deflate or none, received 'br'"),
        ("zstd", BODY, 415, "received 'zstd'"),
        ("gzip", BODY, 400, "expected data of gzip, received others"),
        ("gzip", GZIPPED[:-3], 400, "expected one whole stream of gzip"),
        ("gzip", GZIPPED * 2, 400, "expected one whole stream of gzip"),
        ("gzip", gzip.compress(b" " * (64 << 20), mtime=0), 413, "expected a body of at most"),
    ],
)
async def test_what_does_not_unpack_is_refused_by_name(
    tiny: SimpleNamespace, encoding: str, body: bytes, status: int, message: str
) -> None:
    async with talking(tiny.scripted()) as talk:
        answer = await talk.http.post(CHAT, content=body, headers={"content-encoding": encoding})
        assert answer.status_code == status and message in answer.json()["error"]["message"]
    assert talk.record.calls == ()


async def test_probes_learn_what_is_served(tiny: SimpleNamespace) -> None:
    async with talking(tiny.scripted()) as talk:
        head = await talk.http.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        for method, path, allowed in (("OPTIONS", "/v1/models", "GET"), ("GET", CHAT, "POST")):
            answer = await talk.http.request(method, path)
            assert answer.status_code == 405 and allowed in answer.headers["allow"]
        for path, note in {
            "/api/tags": "Ollama",
            "/v1/completions": "send messages",
            "/v1/embeddings": "computes no embeddings",
            "/v1/conversations": "previous_response_id",
            "/v1/messages/batches": "one request at a time",
            "/v1/v1/chat/completions": "the client's base URL",
            "/health": "/v1/responses",
        }.items():
            for method in ("GET", "POST"):
                answer = await talk.http.request(method, path)
                message = answer.json()["error"]["message"]
                assert answer.status_code == 404
                assert note in message and "expected /v1/chat/completions" in message
    assert talk.record.calls == ()


async def test_anthropics_tool_runner_goes_on_without_a_thread(tiny: SimpleNamespace) -> None:
    @anthropic.beta_async_tool
    async def shell(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    async with talking(tiny.scripted(LS, "done")) as talk:
        run = talk.anthropic.beta.messages.tool_runner
        answer = await run(model="m", max_tokens=90, tools=[shell], messages=HELLO).until_done()
    assert [block.text for block in answer.content] == ["done"]
    assert trained_texts(tiny.tokenizer, talk.record.calls) == [f"{LS}<|im_end|>done<|im_end|>"]
    assert dict(talk.record.refused) == {400: 1}
