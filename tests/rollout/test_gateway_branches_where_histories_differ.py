"""A scripted agent with known branching leaves exactly the expected rows: real server, real model, real client."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import anthropic
from gateway_harness import (
    SHELL,
    Agent,
    misspell,
    rows,
    run_session,
    tool_result,
    trained_text,
)

from tree_rl.tree import Forest

START, END = "<|im_start|>", "<|im_end|>\n"
ASSISTANT = f"{START}assistant\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def turn(text: str) -> str:
    """A user turn and the start of the answer."""
    return f"{START}user\n{text}{END}{ASSISTANT}"


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def result(*texts: str) -> str:
    body = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in texts)
    return f"{START}user{body}{END}{ASSISTANT}"


def texts(tiny: SimpleNamespace, record: Any) -> list[tuple[str, str]]:
    """Each row's text after the tools' description, and what of it is trained."""
    return [
        (
            tiny.tokenizer.decode(row.token_ids).split("</tool_call><|im_end|>\n", 1)[-1],
            trained_text(tiny.tokenizer, row),
        )
        for row in rows(record.calls)
    ]


def test_a_tool_conversation_is_one_row_though_the_client_rewrites_every_message(tiny: SimpleNamespace) -> None:
    first = f"<think>\nlook\n</think>\n\nI look.\n{call('ls').replace(': ', ' :  ')}"
    second = f"<think>\nread\n</think>\n\n{call('cat k')}"

    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")], tools=[SHELL])
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

    record = run_session(tiny.backend({"go": first, "\nk\n": second, "seven": "It is seven."}), play)
    assert texts(tiny, record) == [
        (
            turn("go") + first + END + result("k") + second + END + result("seven") + "It is seven.<|im_end|>",
            f"{first}<|im_end|>{second}<|im_end|>It is seven.<|im_end|>",
        )
    ]
    assert [(drift.call, drift.kind) for drift in record.drift.returned] == [(0, "rewritten")]
    assert record.drift.siblings == ()


def test_reasoning_that_the_template_drops_branches_right_behind_the_prompt(tiny: SimpleNamespace) -> None:
    answers = {f"q{n}": f"<think>\nthought {n}\n</think>\n\nanswer {n}" for n in (1, 2, 3)}

    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [system("s")])
        for n in (1, 2, 3):
            await agent.step(user(f"q{n}"))

    record = run_session(tiny.backend(answers), play)
    begin = f"{START}system\ns{END}"
    q2 = begin + turn("q1") + "answer 1" + END + turn("q2")
    q3 = q2 + "answer 2" + END + turn("q3")
    assert texts(tiny, record) == [
        (prompt + answers[f"q{n}"] + "<|im_end|>", answers[f"q{n}"] + "<|im_end|>")
        for n, prompt in ((1, begin + turn("q1")), (2, q2), (3, q3))
    ]
    first, second, third = rows(record.calls)
    assert common(first, second) == len(record.calls[0].prompt_ids)
    assert common(second, third) == len(record.calls[1].prompt_ids)


def test_reasoning_inside_a_tool_loop_stays_until_the_next_question(tiny: SimpleNamespace) -> None:
    first, second = f"<think>\na\n</think>\n\n{call('ls')}", "<think>\nb\n</think>\n\nDone."

    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")], tools=[SHELL])
        message = await agent.step()
        await agent.step(tool_result(message, "files"))
        await agent.step(user("thanks"))

    record = run_session(tiny.backend({"go": first, "files": second, "thanks": "Bye."}), play)
    loop = turn("go") + first + END + result("files")
    assert [text for text, _ in texts(tiny, record)] == [
        loop + second + "<|im_end|>",
        turn("go") + call("ls") + END + result("files") + "Done." + END + turn("thanks") + "Bye.<|im_end|>",
    ]


def test_parallel_follow_ups_hang_below_the_turn_that_asked_for_them(tiny: SimpleNamespace) -> None:
    both = call("one") + "\n" + call("two")

    async def play(client: Any, _: Any) -> None:
        main = Agent(client, [user("go")], tools=[SHELL])
        message = await main.step()
        branches = []
        for index, text in enumerate(("first", "second")):
            branch = Agent(client, main.messages, tools=[SHELL])
            branches.append(branch.step(tool_result(message, text, index)))
        concluded = await asyncio.gather(*branches)
        await main.step(*[tool_result(message, part.content, index) for index, part in enumerate(concluded)])

    answers = {"go": both, "\nfirst\n": "is 1", "\nsecond\n": "is 2", "is 1": "3"}
    record = run_session(tiny.backend(answers), play)
    asked = turn("go") + both + END
    assert texts(tiny, record) == [
        (asked + result("first") + "is 1<|im_end|>", both + "<|im_end|>is 1<|im_end|>"),
        (asked + result("second") + "is 2<|im_end|>", both + "<|im_end|>is 2<|im_end|>"),
        (asked + result("is 1", "is 2") + "3<|im_end|>", both + "<|im_end|>3<|im_end|>"),
    ]
    assert [call_.turn for call_ in record.calls] == [0, 1, 1, 1]


def test_a_retried_request_is_a_sibling_and_either_answer_can_be_continued(tiny: SimpleNamespace) -> None:
    written = iter(["left", "right"])

    async def play(client: Any, _: Any) -> None:
        left, right = Agent(client, [user("go")]), Agent(client, [user("go")])
        await left.step()
        await right.step()
        await left.step(user("and"))
        await right.step(user("and"))

    backend = tiny.backend()
    backend.script = lambda prompt: "on" if "and<|im_end|>" in prompt else next(written)
    record = run_session(backend, play)
    assert texts(tiny, record) == [
        (turn("go") + side + END + turn("and") + "on<|im_end|>", f"{side}<|im_end|>on<|im_end|>")
        for side in ("left", "right")
    ]
    assert common(*rows(record.calls)) == len(record.calls[0].prompt_ids)


def test_a_line_stays_with_its_own_turn_when_a_retry_said_the_same_in_other_tokens(tiny: SimpleNamespace) -> None:
    text = "the segments of the forest"
    spellings = [[*misspell(tiny.tokenizer, text, seed), tiny.tokenizer.eos_token_id] for seed in (1, 2)]
    assert spellings[0] != spellings[1]
    written = iter(spellings)

    async def play(client: Any, _: Any) -> None:
        first, late = Agent(client, [user("go")]), Agent(client, [user("go")])
        await first.step()
        await first.step(user("and"))
        await late.step()
        await first.step(user("so"))

    backend = tiny.backend()
    backend.script = lambda prompt: "on" if "and<|im_end|>" in prompt else next(written)
    record = run_session(backend, play)
    assert [trained_text(tiny.tokenizer, row) for row in rows(record.calls)] == [
        text + "<|im_end|>on<|im_end|>on<|im_end|>",
        text + "<|im_end|>",
    ]
    assert [drift.text for drift in record.drift.siblings] and record.drift.siblings[0].calls == (0, 2)


def test_a_malformed_turn_that_the_agent_drops_is_trained_in_a_row_of_its_own(tiny: SimpleNamespace) -> None:
    broken = "<tool_call>\n{broken\n</tool_call>"

    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")], tools=[SHELL])
        message = await agent.step()
        assert message.tool_calls is None and message.content == broken
        agent.messages.pop()
        message = await agent.step(user("format error"))
        await agent.step(tool_result(message, "files"))

    record = run_session(tiny.backend({"go": broken, "format": call("ls"), "files": "ok"}), play)
    again = f"{START}user\ngo{END}" + turn("format error") + call("ls") + END + result("files") + "ok<|im_end|>"
    assert texts(tiny, record) == [
        (turn("go") + broken + "<|im_end|>", broken + "<|im_end|>"),
        (again, call("ls") + "<|im_end|>ok<|im_end|>"),
    ]


def test_a_turn_ended_by_a_stop_text_goes_on_without_it(tiny: SimpleNamespace) -> None:
    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")], stop=["\nObservation:"])
        await agent.step()
        await agent.step(user("files"))

    said = misspell(tiny.tokenizer, "Thought: look at the forest\nObservation: nothing")
    record = run_session(tiny.backend({"go": said, "files": "Done"}), play)
    visible = "Thought: look at the forest"
    assert texts(tiny, record) == [
        (turn("go") + visible + "\nObservation:", visible + "\nObservation:"),
        (turn("go") + visible + END + turn("files") + "Done<|im_end|>", visible + "Done<|im_end|>"),
    ]
    first, second = rows(record.calls)
    prompt = len(record.calls[0].prompt_ids)
    kept = common(first, second) - prompt
    assert tiny.tokenizer.decode(record.calls[0].response_ids[:kept]) == visible


def test_a_turn_cut_by_its_limit_goes_on_with_an_end_that_is_not_trained(tiny: SimpleNamespace) -> None:
    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")], max_tokens=4)
        await agent.step()
        await agent.step(user("files"))

    ids = tiny.tokenizer.encode("the forest of segments and tokens", add_special_tokens=False)
    record = run_session(tiny.backend({"go": ids, "files": "Done"}), play)
    (row,) = rows(record.calls)
    cut = tiny.tokenizer.decode(ids[:4])
    assert tiny.tokenizer.decode(row.token_ids) == turn("go") + cut + END + turn("files") + "Done<|im_end|>"
    assert trained_text(tiny.tokenizer, row) == cut + "Done<|im_end|>"


def test_another_end_token_than_the_templates_is_where_the_session_branches(tiny: SimpleNamespace) -> None:
    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")])
        assert (await agent.step()).content == "Hello"
        await agent.step(user("more"))

    other = [*tiny.tokenizer.encode("Hello", add_special_tokens=False), 0]

    class EndsAnyhow(type(tiny.backend())):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            made = await super().generate(*args, **kwargs)
            return type(made)(
                **{name: getattr(made, name) for name in made.__slots__ if name != "finish_reason"},
                finish_reason="stop",
            )

    backend = EndsAnyhow(tiny.model, tiny.tokenizer, tiny.backend({"go": other, "more": "ok"}).script)
    record = run_session(backend, play)
    assert [trained for _, trained in texts(tiny, record)] == ["Hello<|endoftext|>", "Hellook<|im_end|>"]


def test_an_edited_turn_keeps_the_models_tokens_up_to_the_edit(tiny: SimpleNamespace) -> None:
    said = "the forest has segments and then some tokens"
    ids = misspell(tiny.tokenizer, said, seed=3)

    async def play(client: Any, _: Any) -> None:
        agent = Agent(client, [user("go")])
        await agent.step()
        agent.messages[-1]["content"] = "the forest has [...]"
        await agent.step(user("more"))

    record = run_session(tiny.backend({"go": [*ids, tiny.tokenizer.eos_token_id], "more": "ok"}), play)
    first, second = rows(record.calls)
    shared = common(first, second) - len(record.calls[0].prompt_ids)
    kept = tiny.tokenizer.decode(ids[:shared])
    assert "the forest has".startswith(kept) and len(kept) >= len("the forest ha")
    assert trained_text(tiny.tokenizer, second) == kept + "ok<|im_end|>"
    assert turn("go") + "the forest has [...]" + END in tiny.tokenizer.decode(second.token_ids)


def test_both_protocols_continue_each_others_turns(tiny: SimpleNamespace) -> None:
    first = f"<think>\na\n</think>\n\nI look.\n{call('ls')}"
    tool = {"name": "shell", "description": "Run a command.", "input_schema": SHELL["function"]["parameters"]}

    async def play(client: Any, endpoint: Any) -> None:
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token) as messages:
            sent: list[Any] = [{"role": "user", "content": "go"}]
            options = {"model": "m", "max_tokens": 200, "tools": [tool]}
            async with messages.messages.stream(messages=sent, **options) as stream:
                answer = await stream.get_final_message()
            use = answer.content[-1]
            blocks = [block.model_dump() for block in answer.content if block.type != "thinking"]
            done = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "files"}]}
            sent += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [done]}]
            answer = await messages.messages.create(messages=sent, **options)
        assert answer.content[0].text == "Done."
        called = {"name": "shell", "arguments": json.dumps({"command": "ls"})}
        agent = Agent(
            client,
            [
                user("go"),
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [{"id": use.id, "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": use.id, "content": "files"},
                {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
                {"role": "tool", "tool_call_id": use.id, "content": "late"},
            ],
            tools=[SHELL],
        )
        await agent.step()

    record = run_session(tiny.backend({"go": first, "files": "Done.", "late": "Bye."}), play)
    assert texts(tiny, record) == [
        (
            turn("go") + first + END + result("files") + "Done." + END + result("late") + "Bye.<|im_end|>",
            first + "<|im_end|>Done.<|im_end|>Bye.<|im_end|>",
        )
    ]


def common(first: Any, second: Any) -> int:
    """Tokens that two rows share."""
    forest = Forest.from_rows([first.token_ids, second.token_ids])
    return forest.num_flat - forest.num_unique
