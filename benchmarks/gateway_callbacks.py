"""The longest time that one callback of a gateway's event loop takes: so long all other sessions of the worker wait.

    python examples/write_qwen_tokenizer.py outputs/qwen
    python benchmarks/gateway_callbacks.py outputs/qwen

Every callback is timed in processor time of the loop's thread; clients have a thread and a loop of their own. One table
row for each load. The exit status is 1 if a callback took more than 20 ms.
"""

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from gateway_clients import TOOL, prose

LIMIT_MS = 20.0
TEMPLATE = Path(__file__).parents[1] / "tests" / "rollout" / "reasoning_chat.jinja"
STOP = "</answer>"
LONG_TURN = 8_000
"""Tokens."""
BRANCHES = 1_000
BRANCH_TOKENS = 1_000
"""Tokens of each branch's answer, after a prompt of as many."""


class Stopwatch:
    """Processor time of the callbacks of this thread's event loop, in milliseconds."""

    def __init__(self) -> None:
        self.count = 0
        self.longest = 0.0
        self.name = ""
        self.above = 0
        self._thread = threading.get_ident()
        self._run = asyncio.events.Handle._run
        asyncio.events.Handle._run = lambda handle: self._timed(handle)  # type: ignore[method-assign]

    def close(self) -> None:
        """Time no longer."""
        asyncio.events.Handle._run = self._run  # type: ignore[method-assign]

    def _timed(self, handle: Any) -> None:
        if threading.get_ident() != self._thread:
            self._run(handle)
            return
        name = _name(handle)
        started = time.thread_time()
        self._run(handle)
        took = 1e3 * (time.thread_time() - started)
        self.count += 1
        self.above += took > LIMIT_MS
        if took > self.longest:
            self.longest, self.name = took, name


def _name(handle: Any) -> str:
    owner = getattr(handle._callback, "__self__", None)
    step = (
        owner.get_coro().__qualname__ if isinstance(owner, asyncio.Task) else getattr(handle._callback, "__name__", "")
    )
    return step or type(owner).__name__


class Model:
    """Answers at once."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.answer: Callable[[], list[int]] = list
        """Draws an answer. One that is asked for in slices, where a stop text is watched for, is drawn once."""
        self._rest: list[int] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Any:
        """The next tokens of an answer."""
        from tree_rl.rollout.gateway.backend import Generation

        await asyncio.sleep(0)
        left = self._rest or [*self.answer(), self.end]
        ids, self._rest = tuple(left[:max_tokens]), left[max_tokens:]
        is_cut = bool(self._rest)
        return Generation(token_ids=ids, log_probs=(-1.0,) * len(ids), finish_reason="length" if is_cut else "stop")


Ask = Callable[..., Awaitable[Any]]
Load = Callable[[Ask], Awaitable[None]]


async def conversations(ask: Ask, sessions: int, turns: int, words: int) -> None:
    """Sessions at once, each of which appends a tool's result after every answer."""

    async def play(number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": prose(words, number)}]
        for turn in range(turns):
            answer = await ask(number, messages=messages, tools=[TOOL])
            messages += [answer["choices"][0]["message"], {"role": "tool", "content": prose(words, turn)}]

    await asyncio.gather(*[play(number) for number in range(sessions)])


async def branches(ask: Ask) -> None:
    """One session that asks the same a thousand times, and then goes on from one of the answers."""
    messages: list[Any] = [{"role": "user", "content": prose(BRANCH_TOKENS * 3 // 4, 0)}]
    for _ in range(BRANCHES // 100):
        answer = await ask(0, messages=messages, n=100)
    await ask(0, messages=[*messages, answer["choices"][7]["message"], {"role": "user", "content": "so"}])
    edited = answer["choices"][9]["message"]["content"][:2000] + " edited"
    await ask(0, messages=[*messages, {"role": "assistant", "content": edited}, {"role": "user", "content": "so"}])


async def bodies(ask: Ask) -> None:
    """Bodies of almost 8 MiB: one text, many messages, many numbers, many brackets."""
    million = 1_000_000
    await ask(0, messages=[{"role": "user", "content": prose(million, 0)}])
    await ask(0, messages=[{"role": "user", "content": ""}] * (million // 5))
    await ask(0, messages=[], numbers=[1] * (2 * million))
    await ask(0, messages=[], lists=[[]] * million)


def loads(tokenizer: Any, model: Model) -> dict[str, Load]:
    """What is asked, in the words of the table."""
    rng = random.Random(0)
    spelled = tokenizer.encode(prose(LONG_TURN, 1))[:LONG_TURN]
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l"}}\n</tool_call>'
    short = tokenizer.encode(f"<think>\n{prose(80, 0)}\n</think>\n\n{prose(40, 0)}\n{call}")
    stopped = [*spelled, *tokenizer.encode(STOP)]
    opened = tokenizer.encode("<tool_call>" * LONG_TURN)
    user = [{"role": "user", "content": "a"}]

    def answering(draw: Callable[[], list[int]], load: Load) -> Load:
        async def run(ask: Ask) -> None:
            model.answer = draw
            await load(ask)

        return run

    def once(**options: Any) -> Load:
        return lambda ask: ask(0, messages=user, **options)

    return {
        "64 sessions, 12 calls each, prompts up to 17,000 tokens": answering(
            lambda: short, lambda ask: conversations(ask, 64, 12, 800)
        ),
        "4 sessions, 12 calls each, prompts up to 60,000 tokens": answering(
            lambda: short, lambda ask: conversations(ask, 4, 12, 2_800)
        ),
        "a stop text behind 8,000 tokens": answering(lambda: stopped, once(stop=[STOP, "never"])),
        "8,000 tokens with log-probs": answering(lambda: spelled, once(logprobs=True)),
        "8,000 tokens with log-probs, streamed": answering(lambda: spelled, once(logprobs=True, stream=True)),
        "8,000 open tool calls": answering(lambda: opened, once(tools=[TOOL])),
        "1,000 branches of 2,000 tokens": answering(lambda: rng.choices(range(300, 20_000), k=BRANCH_TOKENS), branches),
        "bodies of 8 MiB": answering(lambda: short, bodies),
    }


async def measure(tokenizer: Any, model: Model, load: Load) -> Stopwatch:
    """Run one load, close its sessions and make their rows."""
    from tree_rl.rollout.gateway.gateway import Gateway
    from tree_rl.rollout.gateway.options import GatewayOptions
    from tree_rl.rollout.transcript import rows_of_calls

    options = GatewayOptions(max_context_tokens=65_536, max_turn_tokens=10_000, max_calls=2_000)
    async with Gateway(tokenizer=tokenizer, backend=model, options=options) as gateway:
        opened = [gateway.open_session(sampling={"seed": 1}) for _ in range(64)]
        endpoints = [gateway.endpoint(session) for session in opened]

        async def clients() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=None, limits=limits) as http:

                async def ask(number: int, **body: Any) -> Any:
                    headers = {"authorization": f"Bearer {endpoints[number].token}"}
                    url = f"{endpoints[number].openai_url}/chat/completions"
                    answer = await http.post(url, json={"model": "m", **body}, headers=headers)
                    return None if body.get("stream") else answer.json()

                await load(ask)

        stopwatch = Stopwatch()
        try:
            await asyncio.to_thread(asyncio.run, clients())
            for session in opened:
                record = await gateway.close_session(session)
                await asyncio.to_thread(rows_of_calls, record.calls)
        finally:
            stopwatch.close()
    return stopwatch


def main() -> int:
    """Print one table row for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.chat_template = TEMPLATE.read_text()
    model = Model(tokenizer.eos_token_id)
    print("| load | callbacks | above 20 ms | longest, ms | what ran |\n|---|---|---|---|---|")
    above = 0
    for name, load in loads(tokenizer, model).items():
        seen = asyncio.run(measure(tokenizer, model, load))
        print(f"| {name} | {seen.count:,} | {seen.above} | {seen.longest:.1f} | `{seen.name}` |", flush=True)
        above += seen.above
    return int(above > 0)


if __name__ == "__main__":
    raise SystemExit(main())
