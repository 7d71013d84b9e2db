"""What the recording gateway adds to a call beyond the model's time, with Qwen's vocabulary and growing conversations.

Run: python examples/write_qwen_tokenizer.py outputs/qwen; python benchmarks/gateway_overhead.py outputs/qwen --csv F
The model is a pause that answers with real text. Clients run in a process of their own on the last core, the gateway on
the others: on a shared core a client may run before the gateway's clock stops (--share-cores). With --faults a share of
the calls goes wrong. The others are timed, and the records are compared with what the model gave.
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
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gateway_clients import keep_to, prose
from gateway_faults import HEALTHY, ClientReport, check_record, fail, held

TEMPLATE = Path(__file__).parents[1] / "tests" / "rollout" / "reasoning_chat.jinja"
LOADS = ((1, 30, 0.05), (1, 100, 0.05), (16, 30, 1.0), (64, 10, 1.0), (64, 30, 2.0))
"""Sessions at once, healthy calls of each, and the model's mean pause in seconds."""
CALL_TIMEOUT_S = 10.0
"""Ends the calls of a hanging back end. The model's longest pause takes 3 s."""


@dataclass(kw_only=True, slots=True)
class Call:
    """Seconds of one request."""

    kind: str
    total: float = 0.0
    """Between arrival and answer, inside the gateway's process."""
    model: float = 0.0
    """The model's."""
    late: float = 0.0
    """Part of the model's time: how long its answer waited for the event loop. Timers add up to 1 ms."""


CALL: ContextVar[Call] = ContextVar("CALL")


class Model:
    """Answers after a pause, unless the kind of the call says that it fails."""

    def __init__(self, tokenizer: Any, pause_s: float) -> None:
        call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l"}}\n</tool_call>'
        self.answers = [
            (*tokenizer.encode(f"<think>\n{prose(80, seed)}\n</think>\n\n{prose(40, seed)}\n{call}"), 151645)
            for seed in range(16)
        ]
        self.pause_s = pause_s
        self.running = 0
        self.given: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Any:
        """Pause."""
        from tree_rl.rollout.gateway.backend import Generation

        call = CALL.get()
        self.running += 1
        try:
            await fail(call.kind)
            # Uneven pauses keep sessions out of step.
            asked = self.pause_s * random.uniform(0.5, 1.5)
            started = time.perf_counter()
            await asyncio.sleep(asked)
            ids = random.choice(self.answers)
            call.model = time.perf_counter() - started
            call.late = call.model - asked
        finally:
            self.running -= 1
        self.given[session].append((prompt_ids, ids))
        return Generation(token_ids=ids, log_probs=(-1.0,) * len(ids), finish_reason="stop")


class Stopwatch:
    """ASGI middleware: times every request, by session."""

    def __init__(self, app: Any, calls: dict[str, list[Call]]) -> None:
        self.app, self.calls = app, calls

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Time one request."""
        kind = dict(scope["headers"])[b"x-kind"].decode()
        call = Call(kind=kind)
        CALL.set(call)
        started = time.perf_counter()
        await self.app(scope, receive, send)
        call.total = time.perf_counter() - started
        self.calls[scope["path"].split("/")[2]].append(call)


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What one load gave."""

    milliseconds: Mapping[str, Sequence[float]]
    """Milliseconds of the healthy calls beyond the model's, by where they are measured."""
    longest_prompt: int
    """Tokens."""
    cpu_s: float
    """Processor time of the gateway's process."""
    faults: Counter[str]
    """Kind -> calls."""


async def serve(
    tokenizer: Any, sessions: int, turns: int, pause_s: float, *, faulty: float, share_cores: bool
) -> Played:
    """Run one load, and compare the records with what the model gave.

    Args:
        tokenizer: with its chat template.
        sessions: at once.
        turns: healthy calls of each.
        pause_s: mean.
        faulty: share of all calls.
        share_cores: whether clients may run on the gateway's core.
    """
    from tree_rl.rollout.gateway import server
    from tree_rl.rollout.gateway import session as session_module
    from tree_rl.rollout.gateway.gateway import Gateway
    from tree_rl.rollout.gateway.options import GatewayOptions

    # Only clients that leave in the middle of a stream ask for one. Streams begin soon.
    server.STREAM_PING_S = pause_s / 4
    session_module.CALL_TIMEOUT_S = CALL_TIMEOUT_S
    model = Model(tokenizer, pause_s)
    calls: dict[str, list[Call]] = defaultdict(list)
    options = GatewayOptions(max_context_tokens=65_536, max_turn_tokens=4096)
    gateway = Gateway(tokenizer=tokenizer, backend=model, options=options)
    app = gateway._http.app
    gateway._http.app = lambda: Stopwatch(app(), calls)
    async with gateway:
        opened = [gateway.open_session() for _ in range(sessions)]
        endpoints = [(gateway.endpoint(session).openai_url, session.token) for session in opened]
        asked = {"endpoints": endpoints, "turns": turns, "faulty": faulty, "share_cores": share_cores}
        cpu = time.process_time()
        reports = await run_clients(asked)
        cpu = time.process_time() - cpu
        records = [await gateway.close_session(session) for session in opened]
        assert gateway.num_sessions == 0 and model.running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for session, record, one in zip(opened, records, reports, strict=True):
        check_record(record, model.given[session.id], one)
    healthy = [[call for call in calls[session.id] if call.kind == HEALTHY] for session in opened]
    assert all(len(ones) == len(one.seconds) == turns for ones, one in zip(healthy, reports, strict=True))
    flat = [call for ones in healthy for call in ones]
    round_trips = [second for one in reports for second in one.seconds]
    return Played(
        milliseconds={
            "gateway": [1e3 * (call.total - call.model) for call in flat],
            "wake-up": [1e3 * call.late for call in flat],
            "round trip": [1e3 * (trip - call.model) for trip, call in zip(round_trips, flat, strict=True)],
        },
        longest_prompt=max(prompt for one in reports for prompt, _ in one.tokens),
        cpu_s=cpu,
        faults=sum((Counter(one.faults) for one in reports), Counter()),
    )


async def run_clients(asked: Mapping[str, Any]) -> list[ClientReport]:
    """Play clients in another process."""
    script = str(Path(__file__).with_name("gateway_clients.py"))
    clients = await asyncio.create_subprocess_exec(
        sys.executable, script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = await clients.communicate(json.dumps(asked).encode())
    assert clients.returncode == 0, "the clients failed"
    return [ClientReport(**one) for one in json.loads(out)]


def measure(
    tokenizer: Any, load: tuple[int, int, float], *, faulty: float, share_cores: bool
) -> tuple[dict[str, str], Counter[str]]:
    """One load as a row of the table, and its faults by kind."""
    sessions, turns, pause_s = load
    busy = os.getloadavg()[0]
    before = held()
    started = time.perf_counter()
    played = asyncio.run(serve(tokenizer, sessions, turns, pause_s, faulty=faulty, share_cores=share_cores))
    seconds = time.perf_counter() - started
    after = held()
    assert all(after[name] <= before[name] for name in ("files", "children", "temporary")), (before, after)
    num_faulty = played.faults.total()
    calls = sessions * turns + num_faulty
    row = {
        "sessions": f"{sessions}",
        "calls": f"{sessions * turns}",
        "share of faults": f"{faulty:g}",
        "faulty calls": f"{num_faulty}",
        "longest prompt": f"{played.longest_prompt}",
        "calls/s": f"{calls / seconds:.1f}",
        "CPU ms per call": f"{1e3 * played.cpu_s / calls:.2f}",
    }
    for name, figures in played.milliseconds.items():
        ordered = statistics.quantiles(figures, n=100, method="inclusive")
        row |= {
            f"{name} ms": f"{ordered[49]:.2f}",
            f"{name} ms p90": f"{ordered[89]:.2f}",
            f"{name} ms p99": f"{ordered[98]:.2f}",
        }
    return row | {"load average": f"{busy:.1f}"}, played.faults


def append(file: Path, row: Mapping[str, str]) -> None:
    """Add a row to a CSV file, which begins with the columns' names."""
    is_new = not file.exists()
    with file.open("a", newline="") as out:
        table = csv.DictWriter(out, list(row), lineterminator="\n")
        if is_new:
            table.writeheader()
        table.writerow(row)


def main() -> None:
    """Print one table row per load, and add them to a CSV file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--faults", type=float, default=0.0, metavar="SHARE", help="of all calls that go wrong")
    parser.add_argument("--load", choices=[f"{sessions}x{calls}" for sessions, calls, _ in LOADS], help="this one only")
    parser.add_argument("--share-cores", action="store_true", help="gateway and clients run where the system puts them")
    arguments = parser.parse_args()
    if not 0 <= arguments.faults < 1:
        parser.error(f"--faults {arguments.faults}: expected a share of at least 0 and below 1")
    if not arguments.share_cores:
        keep_to(clients=False)
    from transformers import AutoTokenizer

    from tree_rl.benchmark.provenance import provenance

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.chat_template = TEMPLATE.read_text()
    origin = provenance(packages=("transformers", "uvicorn", "starlette"))
    loads = [load for load in LOADS if arguments.load in (None, f"{load[0]}x{load[1]}")]
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        for number, load in enumerate(loads):
            row, faults = measure(tokenizer, load, faulty=arguments.faults, share_cores=arguments.share_cores)
            if not number:
                print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
            print(f"| {' | '.join(row.values())} |", flush=True)
            if faults:
                print(", ".join(f"{kind}: {count}" for kind, count in sorted(faults.items())), flush=True)
            if arguments.csv is not None:
                append(
                    arguments.csv,
                    row | {"cores": str(os.cpu_count()), "shared cores": str(arguments.share_cores)} | origin,
                )


if __name__ == "__main__":
    main()
