"""What clients ask of an answer's form is honoured, and every row still holds the drawn tokens in their own context."""

from types import SimpleNamespace
from typing import Any

import openai
import pytest
from gateway_harness import CHATML, SHELL, TinyModel, build_tokenizer, talking, tool_result, trained_text, user

from tree_rl.rollout.transcript import rows_of_calls

HELLO = [user("hello")]
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"command": "ls"}}\n</tool_call>'
FORCE_SHELL = {"type": "function", "function": {"name": "shell"}}
FORCED = '<tool_call>\n{"name": "shell", "arguments":'


@pytest.mark.parametrize(
    ("choice", "drawn", "opening"),
    [
        (FORCE_SHELL, ' {"command": "ls"}}\n</tool_call>', FORCED),
        ("required", ' "shell", "arguments": {"command": "ls"}}\n</tool_call>', '<tool_call>\n{"name":'),
    ],
)
async def test_a_forced_call_is_begun_for_the_model_and_only_what_it_drew_is_trained(
    tiny: SimpleNamespace, choice: Any, drawn: str, opening: str
) -> None:
    async with talking(tiny.scripted(drawn, "done")) as talk:
        answer = await talk.ask("hello", tools=[SHELL, READ], tool_choice=choice)
        message = answer.choices[0].message
        sent = [*HELLO, message.model_dump(), tool_result(message, "a.py")]
        await talk.ask(sent, tools=[SHELL, READ])
        record = await talk.close()
    assert answer.choices[0].finish_reason == "tool_calls" and not message.content
    called = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert called == [("shell", '{"command": "ls"}')]
    assert tiny.tokenizer.decode(record.calls[0].prompt_ids).endswith(opening)
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row) == f"{drawn}<|im_end|>done<|im_end|>"
    assert record.drift.branch_causes == {}


async def test_a_forced_call_stands_where_the_template_opens_reasoning(tiny: SimpleNamespace) -> None:
    opens = "{%- if add_generation_prompt %}{{ '<think>\\n' }}{%- endif %}"
    tokenizer = build_tokenizer(tiny.tokenizer.chat_template + opens)
    backend = TinyModel(tiny.model, tokenizer, lambda prompt: ' {"command": "ls"}}\n</tool_call>')
    async with talking(backend) as talk:
        answer = await talk.ask("hello", tools=[SHELL], tool_choice=FORCE_SHELL)
        (call,) = (await talk.close()).calls
    assert answer.choices[0].message.tool_calls[0].function.name == "shell"
    assert tokenizer.decode(call.prompt_ids).endswith(f"<|im_start|>assistant\n{FORCED}")


async def test_a_template_without_calls_refuses_to_force_one(tiny: SimpleNamespace) -> None:
    async with talking(TinyModel(tiny.model, build_tokenizer(CHATML))) as talk:
        with pytest.raises(openai.BadRequestError, match="tool_choice: the model's chat template cannot begin"):
            await talk.ask("hello", tools=[SHELL], tool_choice="required")


@pytest.mark.parametrize("sends", [{"parallel_tool_calls": False}, {}])
async def test_one_call_ends_the_turn_behind_it_and_the_row_goes_on(
    tiny: SimpleNamespace, sends: dict[str, Any]
) -> None:
    both = f"Look.\n{CALL % 'shell'}\n{CALL % 'read'}"
    async with talking(tiny.scripted(both, "done")) as talk:
        answer = await talk.ask("hello", tools=[SHELL, READ], **sends)
        message = answer.choices[0].message
        results = [tool_result(message, "a.py", index) for index in range(len(message.tool_calls))]
        await talk.ask([*HELLO, message.model_dump(), *results], tools=[SHELL, READ], **sends)
        record = await talk.close()
    assert (answer.choices[0].finish_reason, len(results)) == ("tool_calls", 1 if sends else 2)
    (row,) = rows_of_calls(record.calls)
    first = f"Look.\n{CALL % 'shell'}" if sends else f"{both}<|im_end|>"
    assert trained_text(tiny.tokenizer, row) == f"{first}done<|im_end|>"
    assert record.drift.branch_causes == {}


@pytest.mark.parametrize("begun", ["The answer is", "i", "Sum: ", "<tool"])
async def test_a_last_assistant_message_is_continued_and_its_row_goes_on(tiny: SimpleNamespace, begun: str) -> None:
    async with talking(tiny.scripted(" forty-two.", "bye")) as talk:
        create = talk.anthropic.messages.create
        answer = await create(model="m", max_tokens=50, messages=[*HELLO, {"role": "assistant", "content": begun}])
        whole = {"role": "assistant", "content": begun + answer.content[0].text}
        await create(model="m", max_tokens=50, messages=[*HELLO, whole, user("bye")])
        record = await talk.close()
    assert answer.content[0].text == " forty-two."
    assert tiny.tokenizer.decode(record.calls[0].prompt_ids).endswith(begun)
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row) == " forty-two.<|im_end|>bye<|im_end|>"


async def test_continue_final_message_continues_and_without_it_a_new_turn_begins(tiny: SimpleNamespace) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]
    async with talking(tiny.scripted(" is here", "again")) as talk:
        answer = await talk.ask(messages, extra_body={"continue_final_message": True})
        await talk.ask(messages)
        record = await talk.close()
    assert answer.choices[0].message.content == " is here"
    texts = [tiny.tokenizer.decode(call.prompt_ids) for call in record.calls]
    assert texts[0].endswith("The answer") and texts[1].endswith("<|im_start|>assistant\n")


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


async def test_instruct_writes_the_schema_into_the_system_text(tiny: SimpleNamespace) -> None:
    async with talking(tiny.scripted('{"answer": 5}', "hi"), json_output="instruct") as talk:
        await talk.ask([{"role": "system", "content": "Be kind."}, *HELLO], response_format=FORMAT)
        await talk.ask("hello", response_format={"type": "text"})
        record = await talk.close()
    first, second = (tiny.tokenizer.decode(call.prompt_ids) for call in record.calls)
    assert "Be kind.\n\nAnswer with JSON alone" in first and '"required": ["answer"]' in first
    assert "JSON" not in second and record.constrained == 0


async def test_enforce_gives_the_server_the_schema_in_one_request(tiny: SimpleNamespace) -> None:
    asked: list[dict[str, Any]] = []
    backend = tiny.scripted('{"answer": 5}')
    generate = backend.generate

    async def noted(prompt_ids: Any, **options: Any) -> Any:
        asked.append(options)
        return await generate(prompt_ids, **options)

    backend.generate = noted
    async with talking(backend, json_output="enforce") as talk:
        await talk.ask("hello", response_format=FORMAT, stop=["zzz"])
        with pytest.raises(openai.BadRequestError, match="expected no tools beside it"):
            await talk.ask("hello", response_format=FORMAT, tools=[SHELL])
        record = await talk.close()
    (one,) = asked
    assert one["sampling"]["json_schema"] == SCHEMA and one["max_tokens"] == 400
    assert record.constrained == 1
