"""Images in every protocol: the prompt is the one of transformers, calls share them by content, and what is no image is
refused by name."""

import asyncio
import base64
import random
import sys
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
from dictated_answers import answered, completed, said
from drawn_values import READERS
from embedded_server import Client, build_server, describe
from gateway_harness import build_tokenizer
from PIL import Image
from verl.workers.config import HFModelConfig

from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
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
    model = describe(path, trust_remote_code=True)
    server = build_server(model)
    return model, Client(server)


def run(
    served: tuple[HFModelConfig, Client], talk: Callable[[Any], Awaitable[None]]
) -> tuple[tuple[ModelCall, ...], SessionImages]:
    """One session of a client of OpenAI's chat protocol: what it recorded, and its images."""
    model, client = served
    images = SessionImages(model.processor)

    async def session() -> tuple[ModelCall, ...]:
        options = GatewayOptions(max_context_tokens=300, max_turn_tokens=8)
        async with SharedGateways().lend(client, model.tokenizer, options, server="hf", images=images) as gateway:
            opened = gateway.open_session(sampling=SAMPLING)
            endpoint = gateway.endpoint(opened)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as asking:
                await talk(lambda *messages: asking.chat.completions.create(model="m", messages=list(messages)))
            return (await gateway.close_session(opened)).calls

    return asyncio.run(session()), images


def screen(target: str) -> Any:
    """A screenshot by the name of its red button."""
    return next(one.screenshot() for seed in range(50) if (one := Screens(seed, 1)).target == target)


def shown(target: str, *texts: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_url(screen(target))}}
    return {"role": "user", "content": [image, *({"type": "text", "text": text} for text in texts)]}


def test_calls_share_tokens_up_to_another_image_and_rows_carry_theirs(
    served: tuple[HFModelConfig, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = SessionImages.read, list[bytes]()

    def counted(images: SessionImages, encoded: bytes) -> tuple[int, int]:
        reads.append(encoded)
        return read(images, encoded)

    monkeypatch.setattr(SessionImages, "read", counted)

    async def talk(ask: Any) -> None:
        answer = (await ask(SYSTEM, shown("a", "look"))).choices[0].message.model_dump()
        await ask(SYSTEM, shown("a", "look"), answer, shown("b"))
        await ask(SYSTEM, shown("c", "look"), answer, shown("b"))

    (first, second, third), images = run(served, talk)
    assert len(reads) == 3, "an image that is sent again is not read again"
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


def url_of(image: Any, form: str, *, is_broken: bool = False) -> str:
    file = BytesIO()
    image.save(file, form)
    before, mark, after = file.getvalue().rpartition(b"IDAT")
    content = before + (b"ID.T" if is_broken else mark) + after
    return f"data:image/{form.lower()};base64,{base64.b64encode(content).decode()}"


ADDRESS = "https://example.com/a.png"
NO_IMAGE = "image_url: expected an image, received other data"
BROKEN = url_of(Image.effect_noise((400, 400), 99), "PNG", is_broken=True)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (ADDRESS, "content.0..image_url: expected a data: URL of an image in base64, .* fetches no"),
        *((f"data:image/png;base64,{text}", NO_IMAGE) for text in ("aGk=", "%%")),
        (url_of(Image.new("1", (9, 9)), "TIFF"), NO_IMAGE),
        (BROKEN, r"received other data \(broken PNG file"),
        (url_of(Image.new("1", (8000, 5000)), "PNG"), "8000 x 5000, more than 33554432 pixels"),
        ("", r"messages: expected text without <\|image_pad\|>"),
    ],
    ids=["address", "text", "no base64", "TIFF", "broken", "large", "mark"],
)
def test_what_is_no_image_is_refused(served: tuple[HFModelConfig, Client], url: str, why: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}] if url else "say <|image_pad|>"

    async def talk(ask: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=why):
            await ask({"role": "user", "content": content})

    assert run(served, talk)[0] == ()


def test_a_tokenizer_without_places_for_images_is_refused(served: tuple[HFModelConfig, Client]) -> None:
    with pytest.raises(ValueError, match=r"expected the special token <\|vision_start\|>"):
        Renderer(build_tokenizer(), {}, images=ImagePlaces(SessionImages(served[0].processor)))


def noise() -> str:
    """An image whose base64 has both characters that URLs write otherwise."""
    url = data_url(Image.frombytes("RGB", (16, 16), random.Random(0).randbytes(3 * 16 * 16)))
    assert {"+", "/"} <= set(url.split(",")[1])
    return url


def as_chat(url: str) -> ChatRequest:
    image = {"type": "image_url", "image_url": {"url": url}}
    call = {"id": "c", "type": "function", "function": {"name": "click", "arguments": "{}"}}
    shown = {"role": "user", "content": [image, {"type": "text", "text": "look"}]}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": [image]}]
    return openai_chat.read_request({"messages": [SYSTEM, shown, *turns]})


def as_responses(url: str) -> ChatRequest:
    image = {"type": "input_image", "image_url": url}
    call = {"type": "function_call", "call_id": "c", "name": "click", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [image]}
    items = [{"role": "user", "content": [image, {"type": "input_text", "text": "look"}]}, call, result]
    return READERS["responses"]({"model": "m", "instructions": "play", "input": items})


def as_messages(url: str) -> ChatRequest:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data} if data else {"type": "url", "url": url}
    image = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "c", "name": "click", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    turns = [("user", [image, {"type": "text", "text": "look"}]), ("assistant", [call]), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in turns]
    return anthropic_messages.read_request({"max_tokens": 8, "system": "play", "messages": messages})


def as_gemini(url: str) -> ChatRequest:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    of_url = data.replace("+", "-").replace("/", "_")
    address = {"mimeType": "image/png", "fileUri": url}
    image = {"inlineData": {"mimeType": kind, "data": of_url}} if data else {"fileData": address}
    call = {"functionCall": {"id": "c", "name": "click", "args": {}}}
    result = {"functionResponse": {"id": "c", "name": "click", "response": {"output": ""}, "parts": [image]}}
    turns = [("user", [image, {"text": "look"}]), ("model", [call]), ("user", [result])]
    contents = [{"role": role, "parts": parts} for role, parts in turns]
    return READERS["gemini"]({"systemInstruction": {"parts": [{"text": "play"}]}, "contents": contents})


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (as_responses, "input[2].output[0].image_url"),
        (as_messages, "messages[2].content[0].content[0].source"),
        (as_gemini, "contents[2].parts[0].functionResponse.parts[0].fileData"),
    ],
)
def test_every_protocol_reads_the_messages_of_the_chat_protocol(read: Callable[[str], ChatRequest], field: str) -> None:
    for url in (noise(), ADDRESS):
        expected, request = as_chat(url), read(url)
        # Texts and images of a message stand on lines of their own until the images have their places.
        meant, found = ([(one.role, one.content.strip("\n")) for one in each.messages] for each in (expected, request))
        assert found == meant
        assert {mark: image.url for mark, image in request.images.items()} == dict.fromkeys(expected.images, url)
        (mark,) = expected.images
        assert all(mark in request.messages[place].content for place in (1, 3))
    assert [image.field for image in request.images.values()] == [field]


def test_images_of_a_stored_response_are_kept() -> None:
    first, stored = as_responses(noise()), openai_responses.StoredResponses()
    stored.remember(first, answered(completed(said("so"))))
    body = {"model": "m", "input": "on", "previous_response_id": first.response_id}
    later = openai_responses.read_request(body, stored)
    assert later.images == first.images
    assert [one.content for one in later.messages] == [*(one.content for one in first.messages[1:]), "so", "on"]
