"""Images of OpenAI's chat protocol: the prompt is the one of transformers, calls share them by content, and what is no
image is refused by name."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from embedded_server import Client, build_server
from gateway_harness import build_tokenizer
from verl.workers.config import HFModelConfig

from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.tokens.images import ImagePlaces
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import ModelCall, rows_of_calls
from tree_rl.verl_plugin.agent_loops.gateway_shared import SharedGateways
from tree_rl.verl_plugin.agent_loops.session_images import SessionImages

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from gui_window.agent import data_url
from gui_window.model import save
from gui_window.screens import Screens

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 3}
SYSTEM = {"role": "system", "content": "play"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[HFModelConfig, Client]:
    path = tmp_path_factory.mktemp("gui") / "model"
    save(path, shown=0, seed=0)
    model, server = build_server(path, trust_remote_code=True)
    return model, Client(server)


def run(
    served: tuple[HFModelConfig, Client], talk: Callable[[Any], Awaitable[None]]
) -> tuple[tuple[ModelCall, ...], SessionImages]:
    """One session: what it recorded, and its images."""
    model, client = served
    images = SessionImages(model.processor)

    async def session() -> tuple[ModelCall, ...]:
        options = GatewayOptions(max_context_tokens=300, max_turn_tokens=8)
        async with SharedGateways().lend(client, model.tokenizer, options, server="hf", images=images) as gateway:
            opened = gateway.open_session(sampling=SAMPLING)
            endpoint = gateway.endpoint(opened)
            async with openai.AsyncOpenAI(
                base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0
            ) as asking:
                await talk(lambda *messages: asking.chat.completions.create(model="m", messages=list(messages)))
            return (await gateway.close_session(opened)).calls

    return asyncio.run(session()), images


def screen(target: str) -> Any:
    """A screenshot by the name of its red button."""
    return next(one.screenshot() for seed in range(50) if (one := Screens(seed, 1)).target == target)


def shown(target: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(screen(target))}}]
    return {"role": "user", "content": [*parts, *({"type": "text", "text": text} for text in texts)]}


def test_calls_share_tokens_up_to_another_image_and_rows_carry_theirs(served: tuple[HFModelConfig, Client]) -> None:
    async def talk(ask: Any) -> None:
        answer = (await ask(SYSTEM, shown("a", "look"))).choices[0].message.model_dump()
        await ask(SYSTEM, shown("a", "look"), answer, shown("b"))
        await ask(SYSTEM, shown("c", "look"), answer, shown("b"))

    (first, second, third), images = run(served, talk)
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert second.prompt_ids[len(first.prompt_ids) :][: len(first.response_ids)] == first.response_ids
    pairs = zip(second.prompt_ids, third.prompt_ids, strict=True)
    start = next(place for place, (one, other) in enumerate(pairs) if one != other)
    assert start == first.prompt_ids.index(max(first.prompt_ids)), "their first images differ"
    assert len(rows_of_calls((first, second, third))) == 2
    for call, targets in ((first, "a"), (second, "ab"), (third, "cb")):
        found = images.split(call.prompt_ids)[1]
        assert [one.tobytes() for one in found] == [screen(target).tobytes() for target in targets]


def test_a_prompt_is_the_one_of_transformers(served: tuple[HFModelConfig, Client]) -> None:
    processor = served[0].processor

    async def talk(ask: Any) -> None:
        await ask(SYSTEM, shown("a", "look"), {"role": "user", "content": "line\n"}, shown("b"))

    (call,), images = run(served, talk)
    parts = [{"type": "image"}, {"type": "text", "text": "look"}]
    messages = [SYSTEM, {"role": "user", "content": parts}, {"role": "user", "content": "line\n"}]
    messages.append({"role": "user", "content": [{"type": "image"}]})
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = processor(text=[text], images=[screen("a"), screen("b")])["input_ids"][0]
    assert images.split(call.prompt_ids)[0] == list(expected)


def image_part(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


@pytest.mark.parametrize(
    ("message", "why"),
    (
        (image_part("https://example.com/a.png"), "image_url: expected a data: URL of an image in base64"),
        (image_part("data:image/png;base64,aGk="), "image_url: expected an image, received other data"),
        (image_part("data:image/png;base64,%%"), "image_url: expected an image, received other data"),
        ({"role": "user", "content": "say <|image_pad|>"}, r"messages: expected text without <\|image_pad\|>"),
    ),
)
def test_what_is_no_image_is_refused(served: tuple[HFModelConfig, Client], message: dict[str, Any], why: str) -> None:
    async def talk(ask: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=why):
            await ask(message)

    assert run(served, talk)[0] == ()


def test_a_tokenizer_without_places_for_images_is_refused(served: tuple[HFModelConfig, Client]) -> None:
    with pytest.raises(ValueError, match=r"expected the special token <\|vision_start\|>"):
        Renderer(build_tokenizer(), {}, images=ImagePlaces(SessionImages(served[0].processor)))
