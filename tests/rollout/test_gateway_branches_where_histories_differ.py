"""A scripted agent with known branching leaves exactly the expected rows: real server, real model, real client."""

import json
from types import SimpleNamespace
from typing import Any

from gateway_harness import SHELL, misspell, talking, tool_result, trained_text, user

from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest

START, END = "<|im_start|>", "<|im_end|>\n"
ASSISTANT = f"{START}assistant\n"


def turn(text: str) -> str:
    """A user turn and the start of the answer."""
    return f"{START}user\n{text}{END}{ASSISTANT}"


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def result(text: str) -> str:
    return f"{START}user\n<tool_response>\n{text}\n</tool_response>{END}{ASSISTANT}"


def texts(tiny: SimpleNamespace, record: Any) -> list[tuple[str, str]]:
    """Each row's text after the tools' description, and what of it is trained."""
    return [
        (
            tiny.tokenizer.decode(row.token_ids).split("</tool_call><|im_end|>\n", 1)[-1],
            trained_text(tiny.tokenizer, row),
        )
        for row in rows_of_calls(record.calls)
    ]


def common(first: Any, second: Any) -> int:
    """Tokens that two rows share."""
    forest = Forest.from_rows([first.token_ids, second.token_ids])
    return forest.num_flat - forest.num_unique


async def test_a_tool_conversation_is_one_row_though_the_client_rewrites_every_message(tiny: SimpleNamespace) -> None:
    first = f"<think>\nlook\n</think>\n\nI look.\n{call('ls').replace(': ', ' :  ')}"
    second = f"<think>\nread\n</think>\n\n{call('cat k')}"
    async with talking(tiny.backend({"go": first, "\nk\n": second, "seven": "It is seven."})) as talk:
        agent = talk.agent(user("go"), tools=[SHELL])
        message = await agent.step()
        sent = agent.messages[-1]
        assert sent.pop("reasoning_content") == "look"
        sent |= {"provider_specific_fields": {"x": 1}, "content": "I look. \n", "function_call": None}
        sent["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'
        message = await agent.step(tool_result(message, "k"))
        assert message.content is None
        sent = agent.messages[-1]
        assert sent.pop("reasoning_content") == "read"
        sent |= {"content": "", "refusal": None}
        await agent.step(tool_result(message, "seven"))
        record = await talk.close()
    assert texts(tiny, record) == [
        (
            turn("go") + first + END + result("k") + second + END + result("seven") + "It is seven.<|im_end|>",
            f"{first}<|im_end|>{second}<|im_end|>It is seven.<|im_end|>",
        )
    ]
    assert [(drift.call, drift.kind) for drift in record.drift.returned] == [(0, "rewritten")]
    assert record.drift.siblings == ()


async def test_reasoning_that_the_template_drops_branches_right_behind_the_prompt(tiny: SimpleNamespace) -> None:
    answers = {f"q{n}": f"<think>\nthought {n}\n</think>\n\nanswer {n}" for n in (1, 2, 3)}
    async with talking(tiny.backend(answers)) as talk:
        agent = talk.agent({"role": "system", "content": "s"})
        for question in answers:
            await agent.step(user(question))
        record = await talk.close()
    begin = f"{START}system\ns{END}"
    q2 = begin + turn("q1") + "answer 1" + END + turn("q2")
    q3 = q2 + "answer 2" + END + turn("q3")
    assert texts(tiny, record) == [
        (prompt + answers[f"q{n}"] + "<|im_end|>", answers[f"q{n}"] + "<|im_end|>")
        for n, prompt in ((1, begin + turn("q1")), (2, q2), (3, q3))
    ]
    first, second, third = rows_of_calls(record.calls)
    assert common(first, second) == len(record.calls[0].prompt_ids)
    assert common(second, third) == len(record.calls[1].prompt_ids)


async def test_a_line_stays_with_its_own_turn_when_a_retry_said_the_same_in_other_tokens(tiny: SimpleNamespace) -> None:
    text = "the segments of the forest"
    spellings = [[*misspell(tiny.tokenizer, text, seed), tiny.tokenizer.eos_token_id] for seed in (1, 2)]
    assert spellings[0] != spellings[1]
    written = iter(spellings)
    backend = tiny.backend()
    backend.script = lambda prompt: "on" if "and<|im_end|>" in prompt else next(written)
    async with talking(backend) as talk:
        first, late = talk.agent(user("go")), talk.agent(user("go"))
        await first.step()
        await first.step(user("and"))
        await late.step()
        await first.step(user("so"))
        record = await talk.close()
    assert [trained_text(tiny.tokenizer, row) for row in rows_of_calls(record.calls)] == [
        text + "<|im_end|>on<|im_end|>on<|im_end|>",
        text + "<|im_end|>",
    ]
    assert [drift.text for drift in record.drift.siblings] and record.drift.siblings[0].calls == (0, 2)


async def test_a_turn_ended_by_a_stop_text_goes_on_without_it(tiny: SimpleNamespace) -> None:
    said = misspell(tiny.tokenizer, "Thought: look at the forest\nObservation: nothing")
    async with talking(tiny.backend({"go": said, "files": "Done"})) as talk:
        agent = talk.agent(user("go"), stop=["\nObservation:"])
        await agent.step()
        await agent.step(user("files"))
        record = await talk.close()
    visible = "Thought: look at the forest"
    assert texts(tiny, record) == [
        (turn("go") + visible + "\nObservation:", visible + "\nObservation:"),
        (turn("go") + visible + END + turn("files") + "Done<|im_end|>", visible + "Done<|im_end|>"),
    ]
    kept = common(*rows_of_calls(record.calls)) - len(record.calls[0].prompt_ids)
    assert tiny.tokenizer.decode(record.calls[0].response_ids[:kept]) == visible


async def test_a_turn_cut_by_its_limit_goes_on_with_an_end_that_is_not_trained(tiny: SimpleNamespace) -> None:
    ids = tiny.tokenizer.encode("the forest of segments and tokens", add_special_tokens=False)
    async with talking(tiny.backend({"go": ids, "files": "Done"})) as talk:
        agent = talk.agent(user("go"), max_tokens=4)
        await agent.step()
        await agent.step(user("files"))
        record = await talk.close()
    cut = tiny.tokenizer.decode(ids[:4])
    whole = turn("go") + cut + END + turn("files") + "Done<|im_end|>"
    assert texts(tiny, record) == [(whole, cut + "Done<|im_end|>")]


async def test_an_edited_turn_keeps_the_models_tokens_up_to_the_edit(tiny: SimpleNamespace) -> None:
    ids = misspell(tiny.tokenizer, "the forest has segments and then some tokens", seed=3)
    async with talking(tiny.backend({"go": [*ids, tiny.tokenizer.eos_token_id], "more": "ok"})) as talk:
        agent = talk.agent(user("go"))
        await agent.step()
        agent.messages[-1]["content"] = "the forest has [...]"
        await agent.step(user("more"))
        record = await talk.close()
    first, second = rows_of_calls(record.calls)
    shared = common(first, second) - len(record.calls[0].prompt_ids)
    kept = tiny.tokenizer.decode(ids[:shared])
    assert "the forest has".startswith(kept) and len(kept) >= len("the forest ha")
    assert trained_text(tiny.tokenizer, second) == kept + "ok<|im_end|>"
    assert turn("go") + "the forest has [...]" + END in tiny.tokenizer.decode(second.token_ids)


async def test_both_protocols_continue_each_others_turns(tiny: SimpleNamespace) -> None:
    first = f"<think>\na\n</think>\n\nI look.\n{call('ls')}"
    tool = {"name": "shell", "description": "Run a command.", "input_schema": SHELL["function"]["parameters"]}
    options = {"model": "m", "max_tokens": 200, "tools": [tool]}
    async with talking(tiny.backend({"go": first, "files": "Done.", "late": "Bye."})) as talk:
        async with talk.anthropic.messages.stream(messages=[user("go")], **options) as stream:
            answer = await stream.get_final_message()
        use = answer.content[-1]
        blocks = [block.model_dump() for block in answer.content if block.type != "thinking"]
        done = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "files"}]}
        sent: list[Any] = [user("go"), {"role": "assistant", "content": blocks}, {"role": "user", "content": [done]}]
        answer = await talk.anthropic.messages.create(messages=sent, **options)
        assert answer.content[0].text == "Done."
        called = {"name": "shell", "arguments": json.dumps({"command": "ls"})}
        calls = [{"id": use.id, "type": "function", "function": called}]
        agent = talk.agent(
            user("go"),
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": use.id, "content": "files"},
            {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
            {"role": "tool", "tool_call_id": use.id, "content": "late"},
            tools=[SHELL],
        )
        await agent.step()
        record = await talk.close()
    assert texts(tiny, record) == [
        (
            turn("go") + first + END + result("files") + "Done." + END + result("late") + "Bye.<|im_end|>",
            first + "<|im_end|>Done.<|im_end|>Bye.<|im_end|>",
        )
    ]
