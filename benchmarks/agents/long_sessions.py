"""Five harnesses at once in one session, 41 turns each, sub-agents in parallel: rows against the least possible.

Usage: python benchmarks/agents/long_sessions.py OUTPUT.csv [--turns 41] [--readable FOLDER ...] [--agents NAME ...]

A scripted model lets each harness take small steps and repair its task at the end. A proxy logs the requests;
`least_rows` is computed from them alone (request_log.py). `differences` counts calls, tokens and log-probs that the
gateway recorded or would train otherwise than the model generated them.
"""

import argparse
import asyncio
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swe_tasks"))
sys.path.insert(0, str(Path(__file__).parent))

from generate import build_tasks, to_row
from harness_clients import SHELLS
from matrix import TASK, installed, write_command
from request_log import RequestLog, least_rows, logged
from scripted_model import HERMES, Dialect, differences, overlap
from walking_model import WALKER, WalkingModel, task_of

from tree_rl.rollout.agents.agents_by_name import build
from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import ModelCall, rows_of_calls

SECONDS = 1500
AGENTS = ("claude_code", "codex", "qwen_code", "opencode", "mini_swe")
OPTIONS: Mapping[str, Mapping[str, Any]] = {"mini_swe": {"max_turns": 60}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A harness's part of the session; `all` is the whole."""

    agent: str
    calls: int
    rows: int
    least_rows: int
    por: float
    """Prefix overlap ratio of the rows."""
    longest_prompt: int
    """Tokens."""
    ended: str
    reward: float | None
    differences: int
    """Of the whole session."""


async def play(name: str, steps: int, endpoint: Endpoint, readable: list[str]) -> tuple[str, float | None]:
    """One harness walks in its own sandbox."""
    task = next(task for task in build_tasks() if task.instance_id == TASK)
    agent, environment = build(name, OPTIONS.get(name), "swe", {"readable": readable} if readable else {})
    messages = [*to_row(task, 0, "train")["prompt"]]
    messages[-1] = {**messages[-1], "content": f"{task_of(name, steps)}\n\n{messages[-1]['content']}"}
    done = await run_task(
        agent=agent,
        environment=environment,
        endpoint=endpoint.named(name),
        task={"swe": task.to_row()},
        messages=messages,
        timeout_seconds=SECONDS,
    )
    return f"{done.status} {' '.join(done.detail.split())[-150:]}".strip(), done.reward


async def play_all(agents: Sequence[str], turns: int, readable: list[str]) -> list[Line]:
    """All harnesses at once, in one session."""
    dialect = Dialect.of("hermes", HERMES.read_text(), "<|im_end|>")
    task = next(task for task in build_tasks() if task.instance_id == TASK)
    model = WalkingModel(dialect=dialect, repair=write_command(dict(task.solution_files)))
    options = GatewayOptions(max_context_tokens=500_000, max_turn_tokens=20_000)
    logs = {name: RequestLog() for name in agents}
    async with Gateway(tokenizer=dialect.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        endpoint = gateway.endpoint(session)

        async def walk(name: str) -> tuple[str, float | None]:
            async with logged(endpoint, logs[name]) as own:
                # The last turn says that all is done.
                return await play(name, turns - 1, own, readable)

        ended = dict(zip(agents, await asyncio.gather(*(walk(name) for name in agents)), strict=True))
        record = await gateway.close_session(session)
    wrong = differences(model, record)
    causes = {name: len(found) for name, found in asdict(record.drift).items() if found}
    print("drift:", causes, "refused:", dict(record.refused), "left out:", dict(record.left_out))
    lines = []
    for name in agents:
        calls = [call for call in record.calls if walker_of(dialect, call) == name]
        lines.append(_line(name, calls, logs[name].paths, ended[name], wrong))
    paths = [path for log in logs.values() for path in log.paths]
    return [*lines, _line("all", list(record.calls), paths, ("", None), wrong)]


def walker_of(dialect: Dialect, call: ModelCall) -> str:
    """The harness that asked; a sub-agent's is its parent."""
    if call.agent in SHELLS or call.agent == "mini_swe":
        return call.agent
    found = WALKER.search(dialect.tokenizer.decode(list(call.prompt_ids)))
    return found[1].split(".")[0] if found else ""


def _line(name: str, calls: list[ModelCall], paths: Sequence[Any], ended: tuple[str, float | None], wrong: int) -> Line:
    return Line(
        agent=name,
        calls=len(calls),
        rows=len(rows_of_calls(calls)) if calls else 0,
        least_rows=least_rows(paths),
        por=round(overlap(calls), 3),
        longest_prompt=max((len(call.prompt_ids) for call in calls), default=0),
        ended=ended[0],
        reward=ended[1],
        differences=wrong,
    )


def main() -> None:
    """Play, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--agents", nargs="+", default=list(AGENTS))
    parser.add_argument("--readable", nargs="*", default=[], help="folders that sandboxes show besides")
    arguments = parser.parse_args()
    agents = list(installed(sys.executable, arguments.agents))
    lines = asyncio.run(play_all(agents, arguments.turns, arguments.readable))
    with arguments.output.open("w", newline="") as file:
        table = csv.DictWriter(file, list(Line.__dataclass_fields__))
        table.writeheader()
        table.writerows(asdict(line) for line in lines)
    for line in lines:
        print(*asdict(line).values())


if __name__ == "__main__":
    main()
