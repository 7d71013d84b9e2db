"""Every kind of context editing, by the real harness that does it: which rows it leaves, and that each is trained.

Usage: python benchmarks/agents/context_editing.py OUTPUT.csv [--cases NAME ...] [--readable FOLDER ...]

A scripted model lets a harness take steps; what a case sets makes it edit its context. `least_rows` is computed from
the requests alone (request_log.py). `differences` counts calls, tokens and log-probs that the gateway recorded or would
train otherwise than the model generated them: 0 means that every branch is trained as it was generated.
"""

import argparse
import asyncio
import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swe_tasks"))
sys.path.insert(0, str(Path(__file__).parent))

from generate import build_tasks
from matrix import TASK, _version, installed
from request_log import RequestLog, least_rows, logged
from scripted_model import HERMES, Dialect, differences, overlap
from walking_model import SUMMARY, SUMMARY_CHARACTERS, WalkingModel, task_of

from tree_rl.rollout.agents.agents_by_name import build
from tree_rl.rollout.agents.command_line import CommandLineOptions
from tree_rl.rollout.agents.harnesses import HarnessAgent, HarnessOptions
from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import rows_of_calls

SECONDS = 500
CLEARED = "tool_output_masked"
SHORT = "--tools Bash --system-prompt 'You walk.'"
"""Claude Code without its long prompt."""
OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
}


def opencode_config(context: int, output: int, **compaction: Any) -> Mapping[str, str]:
    """opencode's settings for a model with so many tokens of context and of answer."""
    provider = {**OPENCODE, "models": {"policy": {"limit": {"context": context, "output": output}}}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"tree_rl": provider}, "compaction": compaction})}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A harness and what makes it edit its context."""

    kind: str
    harness: str
    steps: int
    noise: int = 0
    """Lines that each step prints."""
    context: int = 500_000
    """Tokens that the gateway takes; longer prompts get status 400."""
    options: Mapping[str, Any] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    """Arguments of each further start in the same sandbox; its task is two steps more."""
    starts_agents: bool = False


CASES: Mapping[str, Case] = {
    "claude_compaction": Case(
        kind="compaction", harness="claude_code", steps=12, noise=10, context=14_000, options={"arguments": SHORT}
    ),
    "opencode_compaction": Case(
        kind="compaction",
        harness="opencode",
        steps=12,
        noise=25,
        options={"variables": opencode_config(32_000, 4_000, auto=True)},
    ),
    "qwen_compaction": Case(kind="compaction", harness="qwen_code", steps=12, noise=25, context=60_000),
    # It masks outputs that lie further back than 50,000 of its tokens, four characters each.
    "gemini_cleared": Case(kind="cleared tool results", harness="gemini_cli", steps=14, noise=380, context=900_000),
    "claude_clear": Case(kind="new session", harness="claude_code", steps=3, again=("",)),
    "claude_continue": Case(kind="session continued", harness="claude_code", steps=3, again=("--continue",)),
    "claude_agents": Case(kind="sub-agents", harness="claude_code", steps=6, starts_agents=True),
    "codex_agents": Case(kind="sub-agents", harness="codex", steps=6, starts_agents=True),
    "opencode_agents": Case(kind="sub-agents", harness="opencode", steps=6, starts_agents=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What a case left."""

    case: str
    kind: str
    harness: str
    version: str
    calls: int
    summaries: int
    """Requests that asked for a summary."""
    cleared: int
    """Prompts with cleared tool results."""
    refused: int
    """Requests that were answered with status 400."""
    rows: int
    least_rows: int
    por: float
    """Prefix overlap ratio of the rows."""
    longest_prompt: int
    """Tokens."""
    differences: int
    ended: str


def started_again(agent: HarnessAgent, case: Case) -> HarnessAgent:
    """The same harness, which runs several times in one sandbox."""
    kind, given = type(agent), HarnessOptions(**case.options)

    class Again(kind):  # type: ignore[misc, valid-type]
        def _options(self, program: str, variables: Mapping[str, str]) -> CommandLineOptions:
            first = super()._options(program, variables)
            commands = [first.command]
            for number, arguments in enumerate(case.again, 1):
                self._given = replace(given, arguments=f"{given.arguments} {arguments}")
                task = task_of(case.harness, case.steps + 2 * number)
                commands.append(super()._options(program, variables).command.replace("{prompt}", f"'{task}'"))
            self._given = given
            return replace(first, command="; ".join(commands))

    again = Again(given)
    again.find_program()
    return again


async def play(name: str, case: Case, readable: list[str]) -> Line:
    """One harness in one session."""
    dialect = Dialect.of("hermes", HERMES.read_text(), "<|im_end|>")
    model = WalkingModel(dialect=dialect, noise=case.noise, starts_agents=case.starts_agents)
    options = GatewayOptions(max_context_tokens=case.context, max_turn_tokens=min(20_000, case.context // 3))
    task = next(task for task in build_tasks() if task.instance_id == TASK)
    agent, environment = build(case.harness, case.options, "swe", {"readable": readable} if readable else {})
    if case.again and isinstance(agent, HarnessAgent):
        agent = started_again(agent, case)
    messages = [{"role": "user", "content": task_of(case.harness, case.steps)}]
    log = RequestLog()
    async with Gateway(tokenizer=dialect.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        async with logged(gateway.endpoint(session), log) as endpoint:
            done = await run_task(
                agent=agent,
                environment=environment,
                endpoint=endpoint,
                task={"swe": task.to_row()},
                messages=messages,
                timeout_seconds=SECONDS,
            )
        record = await gateway.close_session(session)
    prompts = [dialect.tokenizer.decode(list(call.prompt_ids)) for call in record.calls]
    return Line(
        case=name,
        kind=case.kind,
        harness=case.harness,
        version=_version(case.harness),
        calls=len(record.calls),
        summaries=sum(SUMMARY.search(prompt[-SUMMARY_CHARACTERS:]) is not None for prompt in prompts),
        cleared=sum(CLEARED in prompt for prompt in prompts),
        refused=record.refused.get(400, 0),
        rows=len(rows_of_calls(record.calls)),
        least_rows=least_rows(log.paths),
        por=round(overlap(record.calls), 3),
        longest_prompt=max((len(call.prompt_ids) for call in record.calls), default=0),
        differences=differences(model, record),
        ended=f"{done.status} {' '.join(done.detail.split())[-150:]}".strip(),
    )


def main() -> None:
    """Play the cases one after the other; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--readable", nargs="*", default=[], help="folders that sandboxes show besides")
    arguments = parser.parse_args()
    here = set(installed(sys.executable, sorted({CASES[name].harness for name in arguments.cases})))
    with arguments.output.open("w", newline="") as file:
        table = csv.DictWriter(file, list(Line.__dataclass_fields__))
        table.writeheader()
        for name in arguments.cases:
            if CASES[name].harness in here:
                line = asyncio.run(play(name, CASES[name], arguments.readable))
                table.writerow(asdict(line))
                file.flush()
                print(*asdict(line).values(), flush=True)


if __name__ == "__main__":
    main()
