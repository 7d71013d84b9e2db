"""One agent's session: answers its calls and records exact token ids."""

import asyncio
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tree_rl.derived_seed import derived_seed
from tree_rl.rollout.gateway.backend import Answer, Backend, BackendError
from tree_rl.rollout.gateway.calls.json_output import with_json
from tree_rl.rollout.gateway.endpoint import CALL_TIMEOUT_S
from tree_rl.rollout.gateway.generation import cut_after_first_call, generate_answer
from tree_rl.rollout.gateway.long_work import SEARCH, off_the_loop
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Choice, Completion, StopCause
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.openai_responses import StoredResponses
from tree_rl.rollout.gateway.resumption import Resumption
from tree_rl.rollout.gateway.tokens.drift import DriftReport
from tree_rl.rollout.gateway.tokens.images import without_images
from tree_rl.rollout.gateway.tokens.recorder import Prompt, ReadAnswer, Recorder
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import ModelCall


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSession:
    """The record of a closed session."""

    calls: tuple[ModelCall, ...]
    """Calls in the order of their answers. `rows_of_calls` makes rows of them."""
    drift: DriftReport
    cancelled: int
    """Number of calls whose client disconnected, or that still ran when the session was closed."""
    refused: Mapping[int, int]
    """Number of refused requests by HTTP status."""
    left_out: Mapping[str, int]
    """Number of requests by the part that the gateway ignored."""
    constrained: int
    """Number of answers sampled from a constrained distribution (`json_output: enforce`)."""
    model_seconds: float
    """Sum of the calls' generation times."""
    prefix_queries: int
    """Prompt tokens of the calls whose server reported how many of them it had cached."""
    prefix_hits: int
    """Tokens among them that it had cached."""


class Session:
    """Answers and records calls of one agent and its sub-agents.

    Args:
        sampling: the trainer's sampling parameters, in vLLM's names. From its `seed`, each call derives a seed by its
            prompt and the number of earlier calls with the same prompt.
        group: name of the sessions with the same first prompt.
        resumption: the recorded session that this one continues; None starts a new one.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        backend: Backend,
        options: GatewayOptions,
        sampling: Mapping[str, Any],
        group: str | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        self.id = secrets.token_hex(8)
        self._id_in_group = self.id if group is None else f"{group}/{self.id}"
        self.token = secrets.token_urlsafe(32)
        self.responses = StoredResponses()
        """For the Responses API."""
        self.refused: Counter[int] = Counter()
        self.is_exhausted = False
        """True once a call was refused because of `max_calls`."""
        self._left_out: Counter[str] = Counter()
        self._constrained = 0
        self._renderer = renderer
        self._backend = backend if resumption is None else resumption.before(backend)
        self._options = options
        self._sampling = dict(sampling)
        seed = sampling.get("seed")
        own = self.id if seed is None else f"{seed:016x}"
        self.name = own if resumption is None else resumption.session
        """What ids of tool calls start with; a branch keeps its parent's. It repeats in sessions with a seed, because
        templates may write these ids into prompts."""
        self._recorder = Recorder(self.name, renderer=renderer, options=options)
        self._running: set[asyncio.Task[Completion]] = set()
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._admitted = 0
        self._cancelled = 0
        self._model_seconds = 0.0
        self._prefix_queries = self._prefix_hits = 0
        self._is_open = True
        self._closing = asyncio.Lock()
        self._record: RecordedSession | None = None

    def accepts(self, token: str) -> bool:
        """True if a token is this session's. The comparison takes constant time."""
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.token.encode())

    def start_answer(self, request: ChatRequest) -> asyncio.Task[Completion]:
        """Answer a request in a task. Cancelling the task cancels the generation.

        Raises `RequestError` if the session is over, has made `max_calls` calls, or refuses requests for JSON.
        """
        self._refuse_if_over()
        request = with_json(request, self._options.json_output)
        if self._admitted + request.count > self._options.max_calls:
            self.is_exhausted = True
            raise RequestError(
                f"this session has made its {self._options.max_calls} model calls (max_calls)",
                status=403,
                code="session_exhausted",
            )
        self._admitted += request.count
        task = asyncio.create_task(self._complete(request))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return task

    async def count_tokens(self, request: ChatRequest) -> int:
        """Number of tokens of a prompt, without a model call. Raises `RequestError` if the session is over."""
        self._refuse_if_over()
        request = with_json(request, self._options.json_output)
        return await self._recorder.count_tokens(await self._readable(request))

    async def stop(self) -> None:
        """Refuse running and later calls. The record stays, and nothing is added to it once this returns."""
        self._is_open = False
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    async def close(self) -> RecordedSession:
        """Refuse new calls, cancel running ones, and return the record; closing again returns the same one."""
        async with self._closing:
            if self._record is None:
                await self.stop()
                self._record = RecordedSession(
                    calls=tuple(self._recorder.calls),
                    drift=await asyncio.to_thread(self._recorder.drift_report),
                    cancelled=self._cancelled,
                    refused=dict(self.refused),
                    left_out=dict(self._left_out),
                    constrained=self._constrained,
                    model_seconds=self._model_seconds,
                    prefix_queries=self._prefix_queries,
                    prefix_hits=self._prefix_hits,
                )
            return self._record

    def _refuse_if_over(self) -> None:
        if not self._is_open:
            raise session_over()

    async def _readable(self, request: ChatRequest) -> ChatRequest:
        """The request with its images as the model reads them."""
        if not request.images:
            return request
        if self._renderer.images is None:
            return without_images(request)
        return await asyncio.to_thread(self._renderer.images.place, request)

    async def _complete(self, request: ChatRequest) -> Completion:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                prompt, answers = await self._drawn(request)
                read = [await self._read(prompt, answer) for answer, _ in answers]
        except TimeoutError as error:
            raise BackendError(f"the model took longer than {CALL_TIMEOUT_S:g} s", status=504) from error
        # Recorded when all are there, without a pause in which the client can leave: it gets all of them, or none.
        choices = [self._choice(prompt, *one, seconds) for one, (_, seconds) in zip(read, answers, strict=True)]
        return Completion(
            id=f"{self.id}-{secrets.token_hex(6)}",
            created=int(time.time()),
            prompt_tokens=len(prompt.ids),
            choices=tuple(choices),
        )

    async def _drawn(self, request: ChatRequest) -> tuple[Prompt, list[tuple[Answer, tuple[float, float]]]]:
        """The prompt of a request, and its answers with their times. Calls that fail do not count in `max_calls`."""
        try:
            request = await self._readable(request)
            self._left_out.update(request.left_out)
            prompt = await self._recorder.make_prompt(request)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._draw(prompt, number)) for number in range(request.count)]
        except (RequestError, BackendError, ExceptionGroup) as error:
            self._admitted -= request.count
            raise (error.exceptions[0] if isinstance(error, ExceptionGroup) else error) from None
        return prompt, [task.result() for task in tasks]

    async def _draw(self, prompt: Prompt, number: int) -> tuple[Answer, tuple[float, float]]:
        request = prompt.request
        sampling = dict(self._sampling)
        if sampling.get("seed") is not None:
            asked = tuple(prompt.ids)
            sampling["seed"] = derived_seed(sampling["seed"], asked, self._asked[asked])
            self._asked[asked] += 1
        if self._options.sampling_from == "agent":
            sampling |= request.sampling
            if number and sampling.get("seed") is not None:
                sampling["seed"] += number
        if request.json is not None:
            sampling["json_schema"] = request.json.schema
        limits = (self._options.max_turn_tokens, request.max_tokens, self._options.max_context_tokens - len(prompt.ids))
        started = time.monotonic()
        answer = await generate_answer(
            self._backend,
            self._renderer,
            prompt.ids,
            max_tokens=min(limit for limit in limits if limit is not None),
            stop=request.stop,
            sampling=sampling,
            session=self._id_in_group,
        )
        ended = time.monotonic()
        self._model_seconds += ended - started
        if answer.finish_reason == "abort":
            # Not recorded: the agent never sees this answer, so the session's reward says nothing about it.
            raise BackendError("the model server stopped generating; try again", status=503, retry_after=1.0)
        return answer, (started, ended)

    async def _read(self, prompt: Prompt, answer: Answer) -> tuple[Answer, ReadAnswer, dict[str, Any]]:
        """An answer, up to its first call if the request wants one, what it says, and fields of its `Choice`.

        All that takes a while: `_choice` does not wait.
        """
        request = prompt.request
        if request.one_call and request.tools:
            answer = await self._up_to_one_call(prompt, answer)
        reading = await self._recorder.reading(prompt, answer)
        reasoning = await self._reasoning_tokens(answer, reading) if request.with_reasoning_tokens else None
        tokens = await self._tokens(answer) if request.with_log_probs else None
        return answer, reading, {"reasoning_tokens": reasoning, "tokens": tokens}

    def _choice(
        self, prompt: Prompt, answer: Answer, reading: ReadAnswer, fields: dict[str, Any], seconds: tuple[float, float]
    ) -> Choice:
        request = prompt.request
        if answer.cached_tokens is not None:
            self._prefix_queries += len(prompt.ids)
            self._prefix_hits += answer.cached_tokens
        self._constrained += request.json is not None
        message = self._recorder.record(prompt, answer, reading, seconds=seconds)
        if request.one_call:
            message = replace(message, tool_calls=message.tool_calls[:1])
        cause: StopCause = "length" if answer.finish_reason == "length" else "stop"
        if message.tool_calls and cause == "stop":
            cause = "tool_calls"
        elif answer.stop_text is not None:
            cause = "stop_sequence"
        return Choice(
            message=message,
            stop_cause=cause,
            stop_sequence=answer.stop_text if cause == "stop_sequence" else None,
            num_tokens=len(answer.token_ids),
            **fields,
        )

    async def _up_to_one_call(self, prompt: Prompt, answer: Answer) -> Answer:
        def cut() -> Answer:
            _, fault_of_all = self._recorder.read(prompt, answer.text)

            def calls_in(text: str) -> int:
                message, fault = self._recorder.read(prompt, text)
                # A prefix whose reasoning is still open may contain a draft of a call.
                is_draft = fault == "in_reasoning" and fault_of_all != "in_reasoning"
                return 0 if is_draft else len(message.tool_calls)

            return cut_after_first_call(answer, calls_in, self._renderer)

        return await off_the_loop(cut, SEARCH, tokens=len(answer.token_ids))

    async def _reasoning_tokens(self, answer: Answer, reading: ReadAnswer) -> int | None:
        if not reading.shown.reasoning:
            return 0
        before, reasoning, _ = answer.text.partition(reading.shown.reasoning)
        if not reasoning:
            return None
        count = partial(self._renderer.tokens_within, answer.token_ids, before + reasoning)
        return await off_the_loop(count, SEARCH, tokens=len(answer.token_ids))

    async def _tokens(self, answer: Answer) -> tuple[tuple[str, float], ...]:
        def texts() -> list[str]:
            return [self._renderer.decode([token]) for token in answer.token_ids]

        decoded = await off_the_loop(texts, SEARCH, tokens=len(answer.token_ids))
        return tuple(zip(decoded, answer.log_probs or (), strict=False))

    def _finished(self, task: asyncio.Task[Completion]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self._cancelled += 1
        else:
            task.exception()  # asyncio warns of errors that nobody reads, as when the client disconnected


def session_over() -> RequestError:
    """The refusal of a call to a session that has ended, with a status that clients do not retry."""
    return RequestError("this session is over", status=403, code="session_over")
