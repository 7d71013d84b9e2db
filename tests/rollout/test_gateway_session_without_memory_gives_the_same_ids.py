"""A session gives every call the ids that it would give if it read, wrote and tokenized everything anew."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_harness import SHELL, build_tokenizer, misspell
from hostile_conversations import EDITS, edited
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.gateway import openai_api
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.context_trie import Node
from tree_rl.rollout.gateway.fields import RequestError, read_json
from tree_rl.rollout.gateway.messages import ChatMessage
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.own_turns import OwnTurns
from tree_rl.rollout.gateway.recorder import Recorder
from tree_rl.rollout.gateway.rendering import Renderer
from tree_rl.rollout.gateway.session import Session
from tree_rl.rollout.transcript import rows_of_calls


class Dictated:
    """A model whose answers follow from the prompt alone, some of them spelled as no tokenizer spells them."""

    def __init__(self, tokenizer: Any) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
        said = [
            "so",
            "<think>\nthe model\n</think>\n\nanswers",
            f"look {call}",
            "ü\u0301 \U0001f40d",
            "<think>\nopen",
            "",
        ]
        self.answers = [tokenizer.encode(text, add_special_tokens=False) for text in said]
        self.answers += [misspell(tokenizer, text) for text in said[:3]]
        self.end = tokenizer.eos_token_id

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Generation:
        ids = self.answers[sum(prompt_ids) % len(self.answers)]
        return Generation(token_ids=(*ids, self.end), log_probs=None, finish_reason="stop")


class ForgetfulTurns(OwnTurns):
    def restore(self, messages: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], list[bytes]]:
        self._recent = []
        return super().restore(messages)


def ids_on_the_way(node: Node | None) -> tuple[int, ...]:
    return () if node is None else ids_on_the_way(node.parent) + node.ids


@pytest.fixture(scope="module", params=["reuse", "branch"])
def scene(request: Any) -> SimpleNamespace:
    tokenizer = build_tokenizer()
    options = GatewayOptions(max_context_tokens=4000, max_turn_tokens=100, on_drift=request.param)
    return SimpleNamespace(options=options, renderer=Renderer(tokenizer, {}), model=Dictated(tokenizer))


def session_of(scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, *, is_forgetful: bool) -> Session:
    session = Session(renderer=scene.renderer, backend=scene.model, options=scene.options, sampling={})
    session.id = "s"
    recorder = Recorder("s", renderer=scene.renderer, options=scene.options)
    if is_forgetful:
        recorder._own, recorder._written = ForgetfulTurns(), None  # type: ignore[assignment]
        monkeypatch.setattr(recorder._trie, "remember", lambda *_: None)
    session._recorder = recorder
    make = recorder.prompt

    async def prompt(asked: Any) -> Any:
        made = await make(asked)
        if scene.options.on_drift == "reuse":
            assert made.ids == ids_on_the_way(made.node)
        return made

    monkeypatch.setattr(recorder, "prompt", prompt)
    return session


STEPS = st.one_of(
    EDITS, st.tuples(st.sampled_from(["answer", "answer without reasoning", "answer as text"]), st.none())
)
"""Most agents append what they were answered, not always as it was."""


def returned(kind: str, message: dict[str, Any]) -> dict[str, Any]:
    """An answer as an agent sends it back."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content" or kind == "answer"}
    return {"role": "assistant", "content": kept["content"]} if kind == "answer as text" else kept


async def compare(steps: list[tuple[Any, ...]], remembering: Session, forgetful: Session) -> None:
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
        outcomes = []
        for session, request in (
            (remembering, remembering.read(body, openai_api)),
            (forgetful, openai_api.read_request(read_json(body))),
        ):
            try:
                outcomes.append(openai_api.answer(request, await session.start(request, agent="main")))
            except RequestError as error:
                outcomes.append({"error": str(error)})
        assert outcomes[0].get("choices") == outcomes[1].get("choices")
        assert outcomes[0].get("error") == outcomes[1].get("error")
        if "choices" in outcomes[0]:
            message = outcomes[0]["choices"][0]["message"]


def test_a_session_gives_the_ids_that_it_would_give_with_no_memory(
    scene: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    @given(st.lists(STEPS, max_size=14))
    @settings(max_examples=60)
    def check(steps: list[tuple[Any, ...]]) -> None:
        async def run() -> None:
            sessions = [session_of(scene, monkeypatch, is_forgetful=forgetful) for forgetful in (False, True)]
            await compare(steps, *sessions)
            fast, slow = [await session.close() for session in sessions]
            assert fast.calls == slow.calls
            assert fast.drift == slow.drift
            assert rows_of_calls(fast.calls) == rows_of_calls(slow.calls)

        asyncio.run(run())

    check()
