"""Agents that do anything to their history: prompts say what the template says, in the tokens that were recorded."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from gateway_harness import CHATML, TinyModel, build_tokenizer, check_record

from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.session import Session
from tree_rl.rollout.gateway.tokens.recorder import Prompt
from tree_rl.rollout.gateway.tokens.rendering import Renderer

END = "<|im_end|>"


class WildAgent:
    """Continues, retries, forks, edits, drops and compacts, at random."""

    def __init__(self, session: Session, seed: int) -> None:
        self.session = session
        self.random = random.Random(seed)
        self.histories: list[list[ChatMessage]] = [[ChatMessage(role="user", content="the forest")]]
        self.asked: list[tuple[ChatMessage, ...]] = []

    async def act(self) -> None:
        """One request, from a random history changed at random."""
        history = list(self.random.choice(self.histories))
        act = self.random.choice(["go on", "go on", "go on", "retry", "edit", "drop", "compact", "parallel"])
        own = [index for index, message in enumerate(history) if message.role == "assistant"]
        if act == "retry" and own:
            history = history[: own[-1]]
        elif act == "edit" and own:
            index = self.random.choice(own)
            text = history[index].content
            history[index] = ChatMessage(role="assistant", content=text[: len(text) // 2] + "[...]")
        elif act == "drop" and own:
            del history[self.random.choice(own)]
        elif act == "compact":
            history = [history[0], ChatMessage(role="user", content="summary"), *history[-1:]]
        if history[-1].role == "assistant":
            history.append(ChatMessage(role="user", content=self.random.choice(["and", "so what", "segments", "\n"])))
        await asyncio.gather(*[self.ask(history) for _ in range(2 if act == "parallel" else 1)])

    async def ask(self, history: list[ChatMessage]) -> None:
        asked = ChatRequest(model="m", messages=tuple(history), max_tokens=self.random.randint(1, 7))
        completion = await self.session.start(asked, agent="main")
        self.histories.append([*history, completion.choices[0].message])


@pytest.mark.parametrize("seed", range(6))
def test_prompts_say_what_the_template_says_in_recorded_tokens(tiny: SimpleNamespace, seed: int) -> None:
    tokenizer = build_tokenizer(CHATML)
    renderer = Renderer(tokenizer, {})
    options = GatewayOptions(max_context_tokens=2000, max_turn_tokens=20, reasoning="inline")
    backend = TinyModel(tiny.model, tokenizer)
    session = Session(renderer=renderer, backend=backend, options=options, sampling={})
    texts: dict[tuple[int, ...], str] = {}
    make_prompt = session._recorder.prompt

    async def noting(request: ChatRequest, *, agent: str) -> Prompt:
        prompt = await make_prompt(request, agent=agent)
        texts[prompt.ids] = prompt.text
        return prompt

    session._recorder.prompt = noting  # type: ignore[method-assign]

    async def run() -> object:
        agent = WildAgent(session, seed)
        for _ in range(25):
            await agent.act()
        return await session.close()

    record = asyncio.run(run())
    check_record(backend, record)
    reused = 0
    for index, call in enumerate(record.calls):
        text = texts[call.prompt_ids]
        assert tokenizer.decode(call.prompt_ids) == text
        continued = [
            earlier.prompt_ids + renderer.without_end(earlier.response_ids)
            for earlier in record.calls[:index]
            if text.startswith(
                texts[earlier.prompt_ids] + tokenizer.decode(renderer.without_end(earlier.response_ids)) + END
            )
        ]
        if continued:
            reused += 1
            assert any(call.prompt_ids[: len(ids)] == ids for ids in continued)
    assert reused > 5
