"""Real harnesses that edit their context: rows that they leave, against the least that their requests allow.

Usage: python benchmarks/agents/context_editing.py OUTPUT.csv [--cases NAME ...]

Each case is one session in a sandbox. A scripted model walks through shell commands and misspells its tokens; an
independent ledger holds them. A harness that is not on the PATH is left out by name.
"""

import argparse
import asyncio
import csv
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from heard_requests import ListeningGateway
from scripted_model import HERMES, Dialect
from walking_harnesses import WALKERS, Measured, measure, version, walk, with_sub_agents
from walking_model import WalkingModel

from tree_rl.rollout.gateway.options import GatewayOptions

SHORT_CLAUDE = "--tools Bash --system-prompt 'You walk.'"
PARALLEL_CLAUDE = "--tools Bash,Agent --system-prompt 'You walk.'"
SHORT_QWEN = "--core-tools run_shell_command --system-prompt 'You walk.'"
COMPACTING_CODEX = "-c model_context_window=30000 -c model_auto_compact_token_limit=24000"
FORK_STEP, FORK_STEPS = 3, 4
"""The step at which two sub-agents start, and how many steps each walks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A harness and what it does to its context."""

    kind: str
    harness: str
    steps: int
    lines: int = 3
    """Lines of a step's output: some seventy characters each."""
    arguments: str = ""
    agent: str = ""
    """Its class, where it is not the usual one."""
    context: int = 900_000
    """Tokens of a call that the gateway takes; a longer one gets status 400."""
    sub_agents: bool = False


CASES: Mapping[str, Case] = {
    "claude_code_compacts": Case(
        kind="compaction, on status 400",
        harness="claude_code",
        steps=16,
        lines=30,
        arguments=SHORT_CLAUDE,
        context=12_000,
    ),
    "opencode_compacts": Case(
        kind="compaction, its own",
        harness="opencode",
        steps=12,
        lines=30,
        arguments="--title task",
        agent="editing_harnesses.CompactingOpenCode",
    ),
    "qwen_code_compacts": Case(
        kind="compaction, its own",
        harness="qwen_code",
        steps=16,
        lines=30,
        arguments=SHORT_QWEN,
        agent="editing_harnesses.CompactingQwenCode",
    ),
    "codex_compacts": Case(kind="compaction, its own", harness="codex", steps=10, lines=30, arguments=COMPACTING_CODEX),
    "claude_code_clears": Case(
        kind="/clear, then a new task",
        harness="claude_code",
        steps=6,
        arguments=SHORT_CLAUDE,
        agent="editing_harnesses.ClearingClaudeCode",
    ),
    "opencode_prunes": Case(
        kind="cleared tool results",
        harness="opencode",
        steps=20,
        lines=200,
        arguments="--title task",
        agent="editing_harnesses.PruningOpenCode",
    ),
    **{
        f"{name}_forks": Case(kind="two sub-agents", harness=name, steps=8, arguments=arguments, sub_agents=True)
        for name, arguments in {
            "claude_code": PARALLEL_CLAUDE,
            "codex": "",
            "opencode": "--title task",
            "qwen_code": "",
        }.items()
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the table."""

    case: str
    kind: str
    harness: str
    version: str
    ended: str
    refused: int
    """Requests that the gateway refused."""
    measured: Measured = field(repr=False)

    def cells(self) -> dict[str, object]:
        """Column -> value."""
        cells = asdict(self)
        return cells | cells.pop("measured")


async def play(name: str, case: Case) -> Line:
    """One session. Raises `ValueError` if the harness is not installed."""
    dialect = Dialect.of("hermes", HERMES.read_text(), "<|im_end|>")
    walkers = {case.harness: WALKERS[case.harness]}
    if case.sub_agents:
        walkers = with_sub_agents(case.harness, FORK_STEP, FORK_STEPS)
    walkers[case.harness] = replace(walkers[case.harness], lines=case.lines)
    model = WalkingModel(dialect=dialect, walkers=walkers)
    options = GatewayOptions(max_context_tokens=case.context, max_turn_tokens=4000)
    async with ListeningGateway(tokenizer=dialect.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        given = {"arguments": case.arguments}
        done = await walk(case.harness, gateway.endpoint(session), case.steps, agent=case.agent, options=given)
        record = await gateway.close_session(session)
    if done.detail:
        print(done.detail)
    return Line(
        case=name,
        kind=case.kind,
        harness=case.harness,
        version=version(case.harness),
        ended=done.status,
        refused=sum(record.refused.values()),
        measured=measure(model, record, gateway.heard),
    )


def main() -> None:
    """Play the cases, one after the other, and write a line of the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    columns = [*(name for name in Line.__dataclass_fields__ if name != "measured"), *Measured.__dataclass_fields__]
    with arguments.output.open("w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        for name in arguments.cases:
            try:
                line = asyncio.run(play(name, CASES[name]))
            except ValueError as error:
                print(f"{name}: {error}")
                continue
            table.writerow(line.cells())
            file.flush()
            print(*line.cells().values(), flush=True)


if __name__ == "__main__":
    main()
