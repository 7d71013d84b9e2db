"""Images in every protocol: the prompt is the one of transformers, calls share them by content, and what is no image is
refused by name."""

import asyncio
import base64
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from embedded_server import Client, build_server
from gateway_harness import build_tokenizer
from PIL import Image
from verl.workers.config import HFModelConfig

from tree_rl.rollout.gateway.endpoint import Endpoint
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


def run_at(
    served: tuple[HFModelConfig, Client], talk: Callable[[Endpoint], Awaitable[None]]
) -> tuple[tuple[ModelCall, ...], SessionImages]:
    """One session: what it recorded, and its images."""
    model, client = served
    images = SessionImages(model.processor)

    async def session() -> tuple[ModelCall, ...]:
        options = GatewayOptions(max_context_tokens=300, max_turn_tokens=8)
        async with SharedGateways().lend(client, model.tokenizer, options, server="hf", images=images) as gateway:
            opened = gateway.open_session(sampling=SAMPLING)
            await talk(gateway.endpoint(opened))
            return (await gateway.close_session(opened)).calls

    return asyncio.run(session()), images


def run(
    served: tuple[HFModelConfig, Client], talk: Callable[[Any], Awaitable[None]]
) -> tuple[tuple[ModelCall, ...], SessionImages]:
    """One session of a client of OpenAI's chat protocol."""

    async def ask(endpoint: Endpoint) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as asking:
            await talk(lambda *messages: asking.chat.completions.create(model="m", messages=list(messages)))

    return run_at(served, ask)


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
        (image_part("https://example.com/a.png"), "content.0..image_url: expected a data: URL of an image in base64"),
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


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A protocol: how it writes the turns of a session that clicks once on each of three screens, and answers."""

    path: str
    system: Callable[[str], dict[str, Any]]
    turns: str
    """Key of the turns in a request."""
    text: Callable[[str], dict[str, Any]]
    image: Callable[[str], dict[str, Any]]
    """A part, by its URL."""
    user: Callable[[list[Any]], dict[str, Any]]
    called: dict[str, Any]
    result: Callable[[dict[str, Any]], dict[str, Any]]
    answer: Callable[[Any], list[dict[str, Any]]]
    """The turns that a client sends back."""
    more: Mapping[str, Any]


def blocks_of_anthropic(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def parts_of_gemini(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"fileData": {"mimeType": "image/png", "fileUri": url}}
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"inlineData": {"mimeType": kind, "data": base64.urlsafe_b64encode(base64.b64decode(data)).decode()}}


CHAT = Wire(
    path="/v1/chat/completions",
    system=lambda text: {},
    turns="messages",
    text=lambda text: {"type": "text", "text": text},
    image=lambda url: {"type": "image_url", "image_url": {"url": url}},
    user=lambda parts: {"role": "user", "content": parts},
    called={
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "click", "arguments": "{}"}}],
    },
    result=lambda part: {"role": "tool", "tool_call_id": "c", "content": [part]},
    answer=lambda body: [body["choices"][0]["message"]],
    more={},
)
WIRES = {
    "responses": Wire(
        path="/v1/responses",
        system=lambda text: {"instructions": text},
        turns="input",
        text=lambda text: {"type": "input_text", "text": text},
        image=lambda url: {"type": "input_image", "image_url": url},
        user=lambda parts: {"role": "user", "content": parts},
        called={"type": "function_call", "call_id": "c", "name": "click", "arguments": "{}"},
        result=lambda part: {"type": "function_call_output", "call_id": "c", "output": [part]},
        answer=lambda body: body["output"],
        more={},
    ),
    "anthropic": Wire(
        path="/v1/messages",
        system=lambda text: {"system": text},
        turns="messages",
        text=lambda text: {"type": "text", "text": text},
        image=blocks_of_anthropic,
        user=lambda parts: {"role": "user", "content": parts},
        called={"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "click", "input": {}}]},
        result=lambda part: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [part]}],
        },
        answer=lambda body: [{"role": "assistant", "content": body["content"]}],
        more={"max_tokens": 8},
    ),
    "gemini": Wire(
        path="/v1beta/models/m:generateContent",
        system=lambda text: {"systemInstruction": {"parts": [{"text": text}]}},
        turns="contents",
        text=lambda text: {"text": text},
        image=parts_of_gemini,
        user=lambda parts: {"role": "user", "parts": parts},
        called={"role": "model", "parts": [{"functionCall": {"id": "c", "name": "click", "args": {}}}]},
        result=lambda part: {
            "role": "user",
            "parts": [{"functionResponse": {"id": "c", "name": "click", "response": {"output": ""}, "parts": [part]}}],
        },
        answer=lambda body: [body["candidates"][0]["content"]],
        more={},
    ),
}


async def post(endpoint: Endpoint, wire: Wire, turns: list[Any], **more: Any) -> httpx.Response:
    given = {"model": "m", **wire.more, **wire.system("play"), wire.turns: turns, **more}
    if wire is WIRES["gemini"]:
        del given["model"]
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(
            endpoint.url + wire.path, json=given, headers={"Authorization": f"Bearer {endpoint.token}"}
        )


def noise() -> str:
    """An image whose base64 has both characters that URLs write otherwise."""
    url = data_url(Image.frombytes("RGB", (16, 16), random.Random(0).randbytes(3 * 16 * 16)))
    assert {"+", "/"} <= set(url.split(",")[1])
    return url


@pytest.mark.parametrize(("protocol", "stored"), [*((name, False) for name in WIRES), ("responses", True)])
def test_rows_are_those_of_the_chat_protocol(served: tuple[HFModelConfig, Client], protocol: str, stored: bool) -> None:
    url = noise()

    async def talk(endpoint: Endpoint, wire: Wire) -> None:
        opening = [{"role": "system", "content": "play"}] if wire is CHAT else []
        turns = [*opening, wire.user([wire.image(data_url(screen("a"))), wire.text("look")])]
        first = await post(endpoint, wire, turns)
        turns += wire.answer(first.raise_for_status().json())
        new = [wire.user([wire.text("now"), wire.image(url)]), wire.called, wire.result(wire.image(url))]
        if stored and wire is not CHAT:
            answer = await post(endpoint, wire, new, previous_response_id=first.json()["id"])
        else:
            answer = await post(endpoint, wire, [*turns, *new])
        answer.raise_for_status()

    expected, images = run_at(served, lambda endpoint: talk(endpoint, CHAT))
    found, others = run_at(served, lambda endpoint: talk(endpoint, WIRES[protocol]))
    assert [len(images.split(call.prompt_ids)[1]) for call in expected] == [1, 3]
    for call, own in zip(expected, found, strict=True):
        assert own.prompt_ids == call.prompt_ids
        assert own.response_ids == call.response_ids
        assert own.log_probs == pytest.approx(call.log_probs, abs=1e-5)
        pairs = zip(images.split(call.prompt_ids)[1], others.split(own.prompt_ids)[1], strict=True)
        assert all(one.tobytes() == other.tobytes() for one, other in pairs)


@pytest.mark.parametrize(
    ("protocol", "field"),
    (
        ("responses", "input[0].content[0].image_url"),
        ("anthropic", "messages[0].content[0].source"),
        ("gemini", "contents[0].parts[0].fileData"),
    ),
)
def test_addresses_are_refused_in_every_protocol(
    served: tuple[HFModelConfig, Client], protocol: str, field: str
) -> None:
    wire = WIRES[protocol]

    async def talk(endpoint: Endpoint) -> None:
        refused = await post(endpoint, wire, [wire.user([wire.image("https://example.com/a.png")])])
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            f"{field}: expected a data: URL of an image in base64, received 'https://example.com/a.png'; "
            "the gateway fetches nothing"
        )

    assert run_at(served, talk)[0] == ()
