"""Whatever an agent does to its conversation, prompts have the recorded ids, and all that was generated is trained."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_harness import SHELL, build_tokenizer, generated_edges, misspell, trained_edges
from hostile_conversations import EDITS, edited
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols import openai_chat
from tree_rl.rollout.gateway.protocols.fields import RequestError, read_json
from tree_rl.rollout.gateway.session import Session
from tree_rl.rollout.gateway.tokens.context_trie import Node
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import rows_of_calls


class Dictated:
    """A model whose answers follow from the prompt alone, some of them spelled as no tokenizer spells them."""

    def __init__(self, tokenizer: Any) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
        said = ["so", "<think>\nthe model\n</think>\n\nanswers", f"look {call}"]
        said += ["ü\u0301 \U0001f40d", "<think>\nopen", ""]
        self.answers = [tokenizer.encode(text, add_special_tokens=False) for text in said]
        self.answers += [misspell(tokenizer, text) for text in said[:3]]
        self.end = tokenizer.eos_token_id

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Generation:
        ids = self.answers[sum(prompt_ids) % len(self.answers)]
        return Generation(token_ids=(*ids, self.end), log_probs=None, finish_reason="stop")


def ids_on_the_way(node: Node | None) -> tuple[int, ...]:
    return () if node is None else ids_on_the_way(node.parent) + node.ids


@pytest.fixture(scope="module", params=["reuse", "branch"])
def scene(request: Any) -> SimpleNamespace:
    tokenizer = build_tokenizer()
    options = GatewayOptions(max_context_tokens=4000, max_turn_tokens=100, on_drift=request.param)
    return SimpleNamespace(
        tokenizer=tokenizer, options=options, renderer=Renderer(tokenizer, {}), model=Dictated(tokenizer)
    )


def checked_session(scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose prompts are compared with the trie's ids, or with the tokenizer's."""
    session = Session(renderer=scene.renderer, backend=scene.model, options=scene.options, sampling={})
    recorder = session._recorder
    make = recorder.make_prompt

    async def prompt(asked: Any, *, agent: str) -> Any:
        made = await make(asked, agent=agent)
        if scene.options.on_drift == "reuse":
            assert made.ids == ids_on_the_way(made.node)
        else:
            assert list(made.ids) == scene.tokenizer.encode(made.text, add_special_tokens=False)
        return made

    monkeypatch.setattr(recorder, "make_prompt", prompt)
    return session


STEPS = st.one_of(
    EDITS, st.tuples(st.sampled_from(["answer", "answer without reasoning", "answer as text"]), st.none())
)
"""Most agents append what they were answered, not always as it was."""


def returned(kind: str, message: dict[str, Any]) -> dict[str, Any]:
    """An answer as an agent sends it back."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content" or kind == "answer"}
    return {"role": "assistant", "content": kept["content"]} if kind == "answer as text" else kept


async def play(steps: list[tuple[Any, ...]], session: Session) -> None:
    """Ask after every step."""
    conversation: list[Any] = [{"role": "user", "content": "the model answers a question"}]
    tools: tuple[Any, ...] = (SHELL,)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for step in [("append", {"role": "user", "content": "so"}), *steps]:
        tools = step[1] if step[0] == "offer tools" else tools
        if step[0].startswith("answer"):
            conversation = [*conversation, returned(step[0], message), {"role": "tool", "content": "t"}]
        else:
            conversation = edited(conversation, step)
        body = json.dumps({"model": "m", "messages": conversation, "tools": tools}).encode()
        request = openai_chat.read_request(read_json(body))
        try:
            answer = openai_chat.answer(request, await session.start_answer(request, agent="main"))
        except RequestError:
            continue
        message = answer["choices"][0]["message"]


def test_prompts_are_exact_and_all_that_was_generated_is_trained(
    scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    @given(st.lists(STEPS, max_size=14))
    @settings(max_examples=30)
    def check(steps: list[tuple[Any, ...]]) -> None:
        async def run() -> None:
            session = checked_session(scene, monkeypatch)
            await play(steps, session)
            calls = (await session.close()).calls
            assert trained_edges(rows_of_calls(calls)) == generated_edges(calls)

        asyncio.run(run())

    check()
