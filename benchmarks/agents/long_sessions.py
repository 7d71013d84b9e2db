"""Five harnesses at work at once in one session, with sub-agents in parallel, for 41 turns each.

Usage: python benchmarks/agents/long_sessions.py OUTPUT.csv [--harnesses NAME ...] [--steps N]

All ask one gateway with one key and no name. The least number of rows follows from the message lists of the requests
alone. A line for each harness, and one for the session.
"""

import argparse
import asyncio
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from context_editing import FORK_STEPS, PARALLEL_CLAUDE
from heard_requests import HeardRequest, ListeningGateway
from scripted_model import HERMES, Dialect
from walking_harnesses import STARTS, WALKERS, Measured, measure, version, walk, with_sub_agents
from walking_model import TASK, Walker, WalkingModel

from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.session import RecordedSession

HARNESSES = ("claude_code", "codex", "opencode", "qwen_code", "gemini_cli")
ARGUMENTS = {"claude_code": PARALLEL_CLAUDE, "opencode": "--title task"}
STEPS = 40
"""Shell commands of a harness; the turn behind the last one is the 41st."""
FORK_STEP = 10
COLUMNS = ("harness", "version", "ended", *Measured.__dataclass_fields__)


def walkers_of(names: Sequence[str]) -> dict[str, Walker]:
    """All harnesses and their sub-agents."""
    walkers = {}
    for name in names:
        forks = name in STARTS or name == "codex"
        walkers |= with_sub_agents(name, FORK_STEP, FORK_STEPS) if forks else {name: WALKERS[name]}
    return walkers


def part(
    name: str, model: WalkingModel, record: RecordedSession, heard: Sequence[HeardRequest]
) -> tuple[WalkingModel, RecordedSession, list[HeardRequest]]:
    """What belongs to a harness: its own calls and its sub-agents'."""

    def belongs(text: str) -> bool:
        found = TASK.search(text)
        return found is not None and found[1].split("-")[0] == name

    decode = model.dialect.tokenizer.decode
    own = {call.prompt_ids for call in record.calls if belongs(decode(list(call.prompt_ids)))}
    return (
        replace(model, ledger=type(model.ledger)({key: n for key, n in model.ledger.items() if key[0] in own})),
        replace(record, calls=tuple(call for call in record.calls if call.prompt_ids in own)),
        [request for request in heard if belongs(json.dumps(request.body))],
    )


async def play(names: Sequence[str], steps: int) -> list[dict[str, object]]:
    """The session. Raises `ValueError` if a harness is not installed."""
    dialect = Dialect.of("hermes", HERMES.read_text(), "<|im_end|>")
    model = WalkingModel(dialect=dialect, walkers=walkers_of(names))
    options = GatewayOptions(max_context_tokens=900_000, max_turn_tokens=4000)
    async with ListeningGateway(tokenizer=dialect.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        endpoint = gateway.endpoint(session)
        # Its end would end the session for the others.
        endpoint = replace(endpoint, stop_session=None)
        given = [{"arguments": ARGUMENTS[name]} if name in ARGUMENTS else {} for name in names]
        walks = [walk(name, endpoint, steps, options=one) for name, one in zip(names, given, strict=True)]
        ends = await asyncio.gather(*walks)
        record = await gateway.close_session(session)
    lines: list[dict[str, object]] = []
    for name, done in zip(names, ends, strict=True):
        if done.detail:
            print(name, done.detail)
        own = asdict(measure(*part(name, model, record, gateway.heard)))
        lines.append({"harness": name, "version": version(name), "ended": done.status, **own})
    ended = "completed" if all(done.status == "completed" for done in ends) else "not all completed"
    whole = asdict(measure(model, record, gateway.heard))
    return [*lines, {"harness": "all, one session", "version": "", "ended": ended, **whole}]


def main() -> None:
    """Play the session and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--harnesses", nargs="+", choices=WALKERS, default=HARNESSES)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with arguments.output.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for line in asyncio.run(play(arguments.harnesses, arguments.steps)):
            table.writerow(line)
            print(*line.values())


if __name__ == "__main__":
    main()
