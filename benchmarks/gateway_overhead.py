"""What the recording gateway adds to a call beyond the model's time, with Qwen's vocabulary and growing conversations.

Run: python examples/write_qwen_tokenizer.py outputs/qwen; python benchmarks/gateway_overhead.py outputs/qwen --csv F
The model is a pause that answers with real text. Clients run in a process of their own on the last core, the gateway on
the others: on a shared core a client may run before the gateway's clock stops (--share-cores). The records are compared
with what the model gave. `longest callback`: while one of the event loop's callbacks runs, all other sessions wait.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from tree_rl.benchmark.results import read_csv, write_csv
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "tests" / "rollout" / "reasoning_chat.jinja"
WORDS = (ROOT / "docs" / "architecture.md").read_text().split()
LOADS = ("1x30", "1x100", "16x30", "64x10", "64x30")
"""Sessions at once and calls of each."""
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the repository and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(kw_only=True, slots=True)
class Call:
    """Seconds of one request."""

    total: float = 0.0
    """Between arrival and answer, inside the gateway's process."""
    model: float = 0.0
    """The model's."""
    late: float = 0.0
    """Part of the model's time: how long its answer waited for the event loop. Timers add up to 1 ms."""


CALL: ContextVar[Call] = ContextVar("CALL")


class Model:
    """Answers after a pause."""

    def __init__(self, tokenizer: Any, pause_s: float) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l"}}\n</tool_call>'
        self.answers = [
            (*tokenizer.encode(f"<think>\n{prose(80, seed)}\n</think>\n\n{prose(40, seed)}\n{call}"), 151645)
            for seed in range(16)
        ]
        self.pause_s = pause_s
        self.given: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Pause. Uneven pauses keep sessions out of step."""
        call, asked = CALL.get(), self.pause_s * random.uniform(0.5, 1.5)
        started = time.perf_counter()
        await asyncio.sleep(asked)
        ids = random.choice(self.answers)
        call.model = time.perf_counter() - started
        call.late = call.model - asked
        self.given[session].append((prompt_ids, ids))
        return Generation(token_ids=ids, log_probs=(-1.0,) * len(ids), finish_reason="stop")


class Stopwatch:
    """ASGI middleware: times every request, by session."""

    def __init__(self, app: Any, calls: dict[str, list[Call]]) -> None:
        self.app, self.calls = app, calls

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Time one request."""
        call = Call()
        CALL.set(call)
        started = time.perf_counter()
        await self.app(scope, receive, send)
        call.total = time.perf_counter() - started
        self.calls[scope["path"].split("/")[2]].append(call)


class CallbackClock:
    """Longest callback of all event loops of this process, in milliseconds of processor time."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            run(handle)
            self.longest_ms = max(self.longest_ms, 1e3 * (time.thread_time() - started))

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]


def prose(words: int, seed: int) -> str:
    """Words of this repository's documentation."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def keep_to(*, clients: bool) -> None:
    """Leave the last core to the clients, and them to it."""
    cores = range(os.cpu_count() or 1)
    os.sched_setaffinity(0, cores[-1:] if clients else cores[:-1] or cores)


async def converse(http: httpx.AsyncClient, number: int, url: str, token: str, turns: int) -> list[float]:
    """An agent that calls a tool after every answer; seconds of each of its calls."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prose(300, number)},
        {"role": "user", "content": prose(200, -number)},
    ]
    seconds = []
    for turn in range(turns):
        body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
        started = time.perf_counter()
        answer = await http.post(f"{url}/chat/completions", content=body, headers={"authorization": f"Bearer {token}"})
        seconds.append(time.perf_counter() - started)
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        message.pop("reasoning_content", None)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": prose(250, turn)}
        messages += [message, result]
    return seconds


async def play(endpoints: Sequence[tuple[str, str]], turns: int) -> list[list[float]]:
    """All clients at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        return await asyncio.gather(*[converse(http, place, *one, turns) for place, one in enumerate(endpoints)])


async def run_clients(asked: Mapping[str, Any]) -> list[list[float]]:
    """Play clients in another process."""
    clients = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", json.dumps(asked), stdout=subprocess.PIPE
    )
    out, _ = await clients.communicate()
    assert clients.returncode == 0, "the clients failed"
    seconds: list[list[float]] = json.loads(out)
    return seconds


async def serve(
    tokenizer: Any, sessions: int, turns: int, clock: CallbackClock, *, share_cores: bool
) -> dict[str, Any]:
    """Run one load: a row of the table.

    Raises:
        AssertionError: a record is not what the model gave.
    """
    # So far apart that the gateway has time for every call.
    model = Model(tokenizer, pause_s=max(0.05, sessions / 32))
    calls: dict[str, list[Call]] = defaultdict(list)
    options = GatewayOptions(max_context_tokens=65_536, max_turn_tokens=4096)
    gateway = Gateway(tokenizer=tokenizer, backend=model, options=options)
    app = gateway._http.app
    gateway._http.app = lambda: Stopwatch(app(), calls)
    async with gateway:
        opened = [gateway.open_session() for _ in range(sessions)]
        endpoints = [(gateway.endpoint(session).openai_url, session.token) for session in opened]
        await asyncio.sleep(0)  # Ends the callback that made the model's answers.
        clock.longest_ms = 0.0
        cpu, started = time.process_time(), time.perf_counter()
        trips = await run_clients({"endpoints": endpoints, "turns": turns, "share_cores": share_cores})
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
        records = [await gateway.close_session(session) for session in opened]
    for session, record in zip(opened, records, strict=True):
        recorded = [(call.prompt_ids, call.response_ids) for call in record.calls]
        assert recorded == model.given[session.id] and len(recorded) == turns, f"{len(recorded)} calls, or other tokens"
    timed = [call for session in opened for call in calls[session.id]]
    count = sessions * turns
    row: dict[str, Any] = {
        "sessions": sessions,
        "calls": count,
        "longest prompt": max(len(call.prompt_ids) for record in records for call in record.calls),
        "calls/s": f"{count / seconds:.1f}",
        "CPU ms per call": f"{1e3 * cpu / count:.2f}",
        "longest callback ms": f"{clock.longest_ms:.1f}",
    }
    figures = {
        "gateway": [1e3 * (call.total - call.model) for call in timed],
        "wake-up": [1e3 * call.late for call in timed],
        "round trip": [1e3 * (trip - call.model) for trip, call in zip(chain.from_iterable(trips), timed, strict=True)],
    }
    for name, milliseconds in figures.items():
        ordered = statistics.quantiles(milliseconds, n=100, method="inclusive")
        row |= {f"{name} ms{suffix}": f"{ordered[at]:.2f}" for suffix, at in (("", 49), (" p90", 89), (" p99", 98))}
    return row


def main() -> None:
    """Print one table row per load, and add them to a CSV file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--load", nargs="+", default=LOADS, help="sessions at once x calls of each")
    parser.add_argument("--share-cores", action="store_true", help="gateway and clients run where the system puts them")
    parser.add_argument("--clients", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients is not None:
        if not arguments.clients["share_cores"]:
            keep_to(clients=True)
        print(json.dumps(asyncio.run(play(arguments.clients["endpoints"], arguments.clients["turns"]))))
        return
    # Seconds that the clients' process does not need.
    from transformers import AutoTokenizer

    from tree_rl.benchmark.provenance import provenance

    if not arguments.share_cores:
        keep_to(clients=False)
    clock = CallbackClock()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.chat_template = TEMPLATE.read_text()
    about = {"cores": os.cpu_count(), "shared cores": arguments.share_cores}
    about |= provenance(packages=("transformers", "uvicorn", "starlette"))
    for number, load in enumerate(arguments.load):
        sessions, turns = map(int, load.split("x"))
        busy = os.getloadavg()[0]
        row = asyncio.run(serve(tokenizer, sessions, turns, clock, share_cores=arguments.share_cores))
        row |= {"load average": f"{busy:.1f}"}
        if not number:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
        if arguments.csv is not None:
            write_csv(arguments.csv, [*read_csv(arguments.csv), row | about])


if __name__ == "__main__":
    main()
