"""Generates one answer of the model and cuts it at a stop text.

Not every server supports stop texts, so the gateway searches for them. It then generates a turn in slices of growing
size, so that few tokens after a stop text are wasted. Every token is still sampled in its exact context.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from tree_rl.rollout.gateway.backend import Answer, Backend, Generation
from tree_rl.rollout.gateway.long_work import SEARCH, TOKENIZE, off_the_loop
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.tokens.rendering import Renderer

FIRST_SLICE_TOKENS = 64
Drawn = TypeVar("Drawn", bound=Generation)


async def generate_answer(
    backend: Backend,
    renderer: Renderer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    stop: Sequence[str],
    sampling: Mapping[str, Any],
    session: str,
) -> Answer:
    """Generate a turn. Raises `RequestError` if the backend refuses it, `BackendError` if it cannot answer."""
    done = Generation(token_ids=(), log_probs=(), finish_reason="length")
    # With `json_schema` the server restarts the constraint for each request, so the turn must be one slice.
    size = max_tokens if not stop or "json_schema" in sampling else FIRST_SLICE_TOKENS
    while True:
        limit = min(size, max_tokens - len(done.token_ids))
        # With a seed, each slice must use different random numbers.
        seeded = {"seed": sampling["seed"] + len(done.token_ids)} if sampling.get("seed") is not None else {}
        try:
            slice_ = await backend.generate(
                [*prompt_ids, *done.token_ids] if done.token_ids else prompt_ids,
                max_tokens=limit,
                sampling={**sampling, **seeded},
                session=session,
            )
        except ValueError as error:
            raise RequestError(f"the model server refuses this request: {error}", code="refused_by_model") from error
        done = joined(done, slice_)
        # A server also ends a shorter slice by length: where its own context is full.
        is_full = len(slice_.token_ids) < limit or len(done.token_ids) >= max_tokens
        is_last = done.finish_reason != "length" or is_full
        read = partial(_read, done, stop, renderer, is_last=is_last)
        answer = await off_the_loop(read, SEARCH if stop else TOKENIZE, tokens=len(done.token_ids))
        if answer is not None:
            return answer
        size *= 2


def cut_after_first_call(answer: Answer, calls_in: Callable[[str], int], renderer: Renderer) -> Answer:
    """Cut an answer after the token that completes its first tool call, as a stop text would.

    The cut depends only on the tokens before it, so their log-probs stay valid. An answer stays whole if it makes fewer
    than two calls, or if no prefix of it makes exactly one. `calls_in` counts the calls of a text.
    """
    if calls_in(answer.text) < 2:
        return answer
    ids = answer.token_ids
    # Some formats close all calls together: then no prefix makes one call, and bisection ends after the last.
    count = bisect_left(range(1, len(ids) + 1), True, key=lambda n: calls_in(renderer.decode(ids[:n])) > 0) + 1
    text = renderer.decode(ids[:count])
    if calls_in(text) != 1:
        return answer
    return replace(_first(answer, count), stop_text=None, text=text, text_ids=ids[:count])


def _read(done: Generation, stop: Sequence[str], renderer: Renderer, *, is_last: bool) -> Answer | None:
    """The answer from the slices so far; None if it is incomplete."""
    text_ids = renderer.without_end(done.token_ids) if done.finish_reason == "stop" else done.token_ids
    text = renderer.decode(text_ids)
    found = [(text.index(word), word) for word in stop if word in text]
    if found:
        return _cut_at(done, text, min(found), renderer)
    return _answer(done, text=text, text_ids=text_ids, stop_text=None) if is_last else None


def joined(before: Generation, after: Generation) -> Generation:
    """Two slices of one turn as one."""
    log_probs = None
    if before.log_probs is not None and after.log_probs is not None:
        log_probs = before.log_probs + after.log_probs
    both = (before.min_version, before.max_version, after.min_version, after.max_version)
    versions = [version for version in both if version is not None]
    return Generation(
        token_ids=before.token_ids + after.token_ids,
        log_probs=log_probs,
        finish_reason=after.finish_reason,
        min_version=min(versions, default=None),
        max_version=max(versions, default=None),
        # A later request repeats the prompt, which is cached by then.
        cached_tokens=before.cached_tokens if before.token_ids else after.cached_tokens,
        # The later request's prompt contains the earlier tokens, so its routes cover them.
        routes=before.routes if after.routes is None else after.routes,
    )


def _cut_at(done: Generation, text: str, found: tuple[int, str], renderer: Renderer) -> Answer:
    start, stop_text = found
    counts = range(1, len(done.token_ids) + 1)
    # More tokens only make the text longer, so bisection finds the first count that contains the stop text.
    count = counts[bisect_left(counts, True, key=lambda n: stop_text in renderer.decode(done.token_ids[:n]))]
    kept = _first(done, count)
    visible = text[:start]
    text_ids = kept.token_ids[: renderer.tokens_within(kept.token_ids, visible)]
    is_whole = renderer.decode(text_ids) == visible
    return _answer(kept, text=visible, text_ids=text_ids if is_whole else None, stop_text=stop_text)


def _first(done: Drawn, count: int) -> Drawn:
    """The first tokens of a turn, which end it."""
    log_probs = None if done.log_probs is None else done.log_probs[:count]
    return replace(done, token_ids=done.token_ids[:count], log_probs=log_probs, finish_reason="stop")


def _answer(done: Generation, *, text: str, text_ids: tuple[int, ...] | None, stop_text: str | None) -> Answer:
    drawn = {one.name: getattr(done, one.name) for one in fields(done)}
    return Answer(**drawn, text=text, text_ids=text_ids, stop_text=stop_text)
