"""One session's long texts, and what the process held before, do not keep the other sessions waiting."""

import asyncio
import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import Talk, talking, user

from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.generation import generate_answer
from tree_rl.rollout.gateway.long_work import LONG, TOKENIZE
from tree_rl.rollout.gateway.tokens.drift import find_drifted_siblings
from tree_rl.rollout.gateway.tokens.recorder import LONGEST_TOKENS
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import ModelCall

LONG_TEXT = LONG // TOKENIZE
LIMIT = 6000
"""Tokens of a prompt."""


def watched(monkeypatch: pytest.MonkeyPatch, name: str, size: Callable[[Any], int]) -> list[tuple[int, bool]]:
    """What a method of the renderer is given from now on: its size, and whether the event loop's thread called it."""
    found: list[tuple[int, bool]] = []
    method = getattr(Renderer, name)

    def noted(self: Renderer, given: Any) -> Any:
        found.append((size(given), threading.current_thread() is threading.main_thread()))
        return method(self, given)

    monkeypatch.setattr(Renderer, name, noted)
    return found


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """In characters."""
    return watched(monkeypatch, "encode", lambda pieces: sum(map(len, pieces)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """In tokens."""
    return watched(monkeypatch, "decode", len)


async def ask(talk: Talk, *texts: str) -> list[httpx.Response]:
    """Answers to questions that are asked at once."""
    bodies = [{"max_tokens": 2, "messages": [user(text)]} for text in texts]
    return await asyncio.gather(*[talk.http.post("/v1/chat/completions", json=body) for body in bodies])


async def test_long_texts_are_tokenized_beside_the_event_loop(
    tiny: SimpleNamespace, tokenized: list[tuple[int, bool]]
) -> None:
    long = "the forest and its tokens, " * (LONG_TEXT // 20)
    async with talking(tiny.backend(), max_context_tokens=LIMIT) as talk:
        # Asked at once, so that one finds the trie as another has just changed it.
        answers = await ask(talk, long, "short", long, long + "and more")
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(is_here == (length < LONG_TEXT) for length, is_here in tokenized)
    assert sum(length >= LONG_TEXT for length, _ in tokenized) >= 2
    texts = {tiny.tokenizer.decode(call.prompt_ids) for call in talk.record.calls}
    assert {text.count("the forest") for text in texts} == {0, LONG_TEXT // 20}
    whole = [tuple(tiny.tokenizer.encode(text, add_special_tokens=False)) for text in sorted(texts)]
    assert {call.prompt_ids for call in talk.record.calls} == set(whole)


async def test_of_a_text_far_beyond_the_limit_only_the_beginning_is_tokenized(
    tiny: SimpleNamespace, tokenized: list[tuple[int, bool]]
) -> None:
    async with talking(tiny.backend(), max_context_tokens=LIMIT) as talk:
        (answer,) = await ask(talk, "one two " * 500_000)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"tokens > {LIMIT - 1} maximum" in error["message"]
    assert max(length for length, _ in tokenized) == LONGEST_TOKENS * LIMIT
    assert talk.record.calls == () and talk.record.refused == {400: 1}


async def test_a_text_of_long_tokens_is_read_to_the_end_before_it_is_refused_or_not(tiny: SimpleNamespace) -> None:
    fits = " permission" * (LIMIT - 500)
    assert len(tiny.tokenizer.encode(" permission")) == 1 and len(fits) > LONGEST_TOKENS * LIMIT
    async with talking(tiny.backend(), max_context_tokens=LIMIT) as talk:
        answer, refused = await ask(talk, fits, fits + " permission" * 500)
    (call,) = talk.record.calls
    assert (answer.status_code, refused.status_code) == (200, 400)
    assert call.prompt_ids.count(tiny.tokenizer.encode(" permission")[0]) == LIMIT - 500
    assert LIMIT < int(refused.json()["error"]["message"].split()[4]) < LIMIT + 100


class Written:
    """A model that writes one answer, in slices."""

    def __init__(self, ids: list[int]) -> None:
        self.left = ids

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **_: Any) -> Generation:
        ids, self.left = tuple(self.left[:max_tokens]), self.left[max_tokens:]
        return Generation(token_ids=ids, log_probs=None, finish_reason="length" if self.left else "stop")


@pytest.mark.parametrize("num_words", [1, 50, 500, 8000])
@pytest.mark.parametrize("stop", ["STOP", "P", "\U0001f40d"])
async def test_a_stop_text_is_found_at_its_first_token_with_few_looks(
    tiny: SimpleNamespace, decoded: list[tuple[int, bool]], num_words: int, stop: str
) -> None:
    renderer = Renderer(tiny.tokenizer, {})
    ids = tiny.tokenizer.encode(" token" * num_words + "\U0001f40cSTOP\U0001f40d and more")
    ids.append(tiny.tokenizer.eos_token_id)
    texts = [tiny.tokenizer.decode(ids[:count]) for count in range(max(0, len(ids) - 40), len(ids))]
    expected = next(len(ids) - min(40, len(ids)) + count for count, text in enumerate(texts) if stop in text)
    decoded.clear()
    answer = await generate_answer(
        Written(ids), renderer, [1], max_tokens=20_000, stop=["never", stop], sampling={}, session="s"
    )
    assert answer.token_ids == tuple(ids[:expected]) and answer.stop_text == stop
    assert stop not in answer.text and answer.text == tiny.tokenizer.decode(ids).split(stop)[0]
    assert len(decoded) < 60
    assert all(length < 1000 for length, is_here in decoded if is_here)


def test_siblings_are_compared_only_where_their_text_begins_alike(
    tiny: SimpleNamespace, decoded: list[tuple[int, bool]]
) -> None:
    renderer = Renderer(tiny.tokenizer, {})
    plain = [number for number in range(len(tiny.tokenizer)) if number not in renderer.special_ids]
    calls = [ModelCall(prompt_ids=(1,), response_ids=(first, *plain[-20:]), log_probs=None) for first in plain]
    find_drifted_siblings(calls, renderer.decode)
    # All 400,000 pairs would be decoded at least twice each.
    assert len(calls) > 800 and len(decoded) < 100 * len(calls)


async def test_the_garbage_collector_leaves_alone_what_was_there_before_a_gateway(tiny: SimpleNamespace) -> None:
    assert gc.get_freeze_count() == 0
    async with talking(tiny.backend()) as talk:
        # Only what the collector searches is listed.
        searched = {id(one) for one in gc.get_objects()}
        assert id(talk.session) in searched and id(tiny.tokenizer) not in searched
        await talk.close()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
