"""What the recording gateway adds to a call beyond the model's time, with Qwen's vocabulary and growing conversations.

Run: python examples/write_qwen_tokenizer.py outputs/qwen; python benchmarks/gateway_overhead.py outputs/qwen --csv F
The model is a pause that answers with real text. Clients run in a process of their own, on the last core, the gateway
on the others: on a shared core a client may run before the gateway's clock stops (--share-cores).
"""

import argparse
import asyncio
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parents[1] / "tests" / "rollout" / "qwen3_chat.jinja"
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the repository and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def prose(words: int, seed: int) -> str:
    """Words of this repository's documentation."""
    vocabulary = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split()
    generator = random.Random(seed)
    return " ".join(generator.choice(vocabulary) for _ in range(words))


class PausingModel:
    """Answers after a pause, and knows how long each pause really was."""

    def __init__(self, tokenizer: Any, pause_s: float) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l"}}\n</tool_call>'
        self.answers = [
            [*tokenizer.encode(f"<think>\n{prose(80, seed)}\n</think>\n\n{prose(40, seed)}\n{call}"), 151645]
            for seed in range(16)
        ]
        self.pause_s = pause_s
        self.spent: dict[str, list[float]] = defaultdict(list)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Any:
        """Pause."""
        from tree_rl.rollout.gateway.backend import Generation

        started = time.perf_counter()
        # Uneven pauses, so that sessions do not march in step.
        await asyncio.sleep(self.pause_s * random.uniform(0.5, 1.5))
        ids = tuple(random.choice(self.answers))
        self.spent[session].append(time.perf_counter() - started)
        return Generation(token_ids=ids, log_probs=(-1.0,) * len(ids), finish_reason="stop")


class Stopwatch:
    """ASGI middleware: seconds between a request's arrival and its answer, inside the gateway's process."""

    def __init__(self, app: Any, spent: dict[str, list[float]]) -> None:
        self.app, self.spent = app, spent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Time one request."""
        started = time.perf_counter()
        await self.app(scope, receive, send)
        if scope["type"] == "http":
            self.spent[scope["path"].split("/")[2]].append(time.perf_counter() - started)


def keep_to(*, clients: bool) -> None:
    """Leave the last core to the clients, and them to it."""
    cores = range(os.cpu_count() or 1)
    os.sched_setaffinity(0, cores[-1:] if clients else cores[:-1] or cores)


async def serve(
    tokenizer: Any, sessions: int, turns: int, pause_s: float, *, share_cores: bool
) -> dict[str, list[float]]:
    """Run one load; return milliseconds beyond the model's, by where they are measured."""
    from tree_rl.rollout.gateway.gateway import Gateway
    from tree_rl.rollout.gateway.options import GatewayOptions
    from tree_rl.rollout.transcript import rows_of_calls

    model = PausingModel(tokenizer, pause_s)
    inside: dict[str, list[float]] = defaultdict(list)
    options = GatewayOptions(max_context_tokens=200_000, max_turn_tokens=4096)
    gateway = Gateway(tokenizer=tokenizer, backend=model, options=options)
    app = gateway._doors.app
    gateway._doors.app = lambda: Stopwatch(app(), inside)
    async with gateway:
        opened = [gateway.open_session() for _ in range(sessions)]
        endpoints = [[gateway.endpoint(s).openai_url, s.token] for s in opened]
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--client", str(turns), *(["--share-cores"] * share_cores)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        cpu = time.process_time()
        out, _ = await client.communicate(json.dumps(endpoints).encode())
        cpu = time.process_time() - cpu
        latencies = json.loads(out)
        records = [await gateway.close_session(session) for session in opened]
    assert all(len(record.calls) == turns and len(rows_of_calls(record.calls)) == 1 for record in records)
    longest = max(len(record.calls[-1].prompt_ids) for record in records)
    spent = [model.spent[session.id] for session in opened]
    return {
        "gateway": [
            1e3 * (total - pause)
            for session, pauses in zip(opened, spent, strict=True)
            for total, pause in zip(inside[session.id], pauses, strict=True)
        ],
        "round trip": [
            1e3 * (total - pause)
            for totals, pauses in zip(latencies, spent, strict=True)
            for total, pause in zip(totals, pauses, strict=True)
        ],
        "tokens": [float(longest)],
        "cpu": [1e3 * cpu / (sessions * turns)],
    }


async def play(turns: int, endpoints: list[list[str]]) -> list[list[float]]:
    """The clients: each talks through its session, its calls one after the other."""
    import httpx

    async def session(client: httpx.AsyncClient, number: int, url: str, token: str) -> list[float]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": prose(300, number)},
            {"role": "user", "content": prose(200, -number)},
        ]
        seconds = []
        for turn in range(turns):
            body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]})
            started = time.perf_counter()
            answer = await client.post(
                f"{url}/chat/completions", content=body, headers={"authorization": f"Bearer {token}"}
            )
            seconds.append(time.perf_counter() - started)
            message = answer.json()["choices"][0]["message"]
            message.pop("reasoning_content", None)
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": prose(250, turn)}
            messages += [message, result]
        return seconds

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        return await asyncio.gather(*[session(client, n, url, token) for n, (url, token) in enumerate(endpoints)])


LOADS = ((1, 30, 0.05), (1, 100, 0.05), (16, 30, 1.0), (64, 10, 1.0), (64, 30, 2.0))
"""Sessions at once, calls of each, and the model's mean pause in seconds."""


def measure(tokenizer: Any, sessions: int, turns: int, pause_s: float, *, share_cores: bool) -> dict[str, str]:
    """One load as a row of the table."""
    busy = os.getloadavg()[0]
    started = time.perf_counter()
    figures = asyncio.run(serve(tokenizer, sessions, turns, pause_s, share_cores=share_cores))
    rate = sessions * turns / (time.perf_counter() - started)
    row = {
        "sessions": f"{sessions}",
        "calls": f"{sessions * turns}",
        "longest prompt": f"{figures['tokens'][0]:.0f}",
        "calls/s": f"{rate:.1f}",
        "CPU ms per call": f"{figures['cpu'][0]:.2f}",
    }
    for name in ("gateway", "round trip"):
        ordered = statistics.quantiles(figures[name], n=100, method="inclusive")
        row |= {f"{name} ms": f"{ordered[49]:.2f}", f"{name} ms p99": f"{ordered[98]:.2f}"}
    return row | {"load average": f"{busy:.1f}"}


def main() -> None:
    """Print one table row per load, and write them to a CSV file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--share-cores", action="store_true", help="gateway and clients run where the system puts them")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.share_cores:
        keep_to(clients=arguments.client is not None)
    if arguments.client is not None:
        print(json.dumps(asyncio.run(play(arguments.client, json.load(sys.stdin)))))
        return
    from transformers import AutoTokenizer

    from tree_rl.benchmark.provenance import provenance

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.chat_template = TEMPLATE.read_text()
    rows: list[dict[str, str]] = []
    for load in LOADS:
        row = measure(tokenizer, *load, share_cores=arguments.share_cores)
        if not rows:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(row.values())} |", flush=True)
        rows.append(
            row
            | {"cores": str(os.cpu_count()), "shared cores": str(arguments.share_cores)}
            | provenance(packages=("transformers", "uvicorn", "starlette"))
        )
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)


if __name__ == "__main__":
    main()
