"""Branches of software sessions from a copy of the files and by repeated calls: are their rewards equal?

All is real but the model, which draws its turns: agent, gateway, sandbox, tests. Each session branches at a drawn cut
twice, with the same seed. Sessions that begin with a command of `RESTLESS` follow, which may answer otherwise when it
is repeated. Copies need bubblewrap.

PYTHONPATH=.:kernels python benchmarks/copy_and_replay.py --csv docs/benchmarks/copy_and_replay.csv
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path[:0] = [str(RECIPES / "swe_tasks"), str(RECIPES)]
from experts import shell, write_command  # noqa: E402
from generate import build_tasks, to_row  # noqa: E402
from tiny_swe_model import build_swe_tokenizer  # noqa: E402

from tree_rl.benchmark.provenance import provenance  # noqa: E402
from tree_rl.benchmark.results import collect_rows  # noqa: E402
from tree_rl.rollout.agents.in_environment import run_task  # noqa: E402
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions  # noqa: E402
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment  # noqa: E402
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording  # noqa: E402
from tree_rl.rollout.environments.swe import SweEnvironment  # noqa: E402
from tree_rl.rollout.environments.swe_task import SweTask  # noqa: E402
from tree_rl.rollout.gateway.backend import Generation  # noqa: E402
from tree_rl.rollout.gateway.gateway import Gateway  # noqa: E402
from tree_rl.rollout.gateway.options import GatewayOptions  # noqa: E402
from tree_rl.rollout.sandbox.sandbox import SandboxOptions  # noqa: E402
from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap  # noqa: E402

COMMANDS = (
    "ls -R && cat *.py",
    "mkdir -p notes/empty && echo seen >> notes/log && wc -l notes/log",
    "ln -sf log notes/link; ls notes",
    "printf 'print(1)\\n' > run.sh && chmod 755 run.sh && stat -c '%a %n' run.sh",
    "python3 -c 'import glob; print(sorted(glob.glob(\"**\", recursive=True)))'",
    "rm -f run.sh; false",
)
"""What the model does besides repairing and ending. Their output tells the state of the files."""
RESTLESS: Mapping[str, str] = {
    "clock": "date +%s%N",
    "random": "python3 -c 'import random; print(random.random())'",
    "pid": "echo $$",
    "unseen clock": "date +%s%N > stamp",
}
"""Commands that may differ when they are repeated; the result of the last does not say so."""


class DrawingModel:
    """Draws a turn from the seed of the call; a turn may be asked for from any of its tokens on.

    Args:
        tasks: those that sessions work on.
        max_turns: turns of a session.
        ends: chance that a turn after the first is the last.
        first: command of the first turn; None draws it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[SweTask],
        *,
        max_turns: int = 5,
        ends: float = 0.2,
        first: str | None = None,
    ) -> None:
        self.tokenizer, self.tasks, self.max_turns, self.ends, self.first = tokenizer, tasks, max_turns, ends, first
        self.generated = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Write the rest of a turn."""
        prompt = self.tokenizer.decode(list(prompt_ids))
        rng = random.Random(sampling["seed"])
        before, _, started = prompt.rpartition("<|im_start|>assistant\n")
        text = self._turn(prompt, before.count("<|im_start|>assistant"), rng)
        if started:
            # It goes on after what a branch kept: with any words and one call.
            text = f" {rng.randrange(1000)}" + (text if "<tool_call>" not in started else "")
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id][:max_tokens]
        self.generated += len(ids)
        log_probs = tuple(-rng.random() for _ in ids)
        finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Generation(token_ids=tuple(ids), log_probs=log_probs, finish_reason=finish)

    def _turn(self, prompt: str, turn: int, rng: random.Random) -> str:
        thought = f"step {rng.randrange(1000)}\n"
        if not turn and self.first is not None:
            return thought + shell(self.first)
        if turn >= self.max_turns - 1 or (turn and rng.random() < self.ends):
            return thought + "done"
        if rng.random() < 0.35:
            (task,) = [task for task in self.tasks if task.problem_statement in prompt]
            return thought + shell(write_command(task.solution_files))
        return thought + shell(rng.choice(COMMANDS))


class SavingTimed(SweEnvironment):
    """Also keeps the seconds of every copy of its files."""

    def __init__(self, options: SandboxOptions) -> None:
        super().__init__(options)
        self.save_seconds: list[float] = []

    async def save(self, folder: Path) -> bool:
        """Copy the files after a tool call."""
        started = time.perf_counter()
        saved = await super().save(folder)
        self.save_seconds.append(time.perf_counter() - started)
        return saved


class ResetTimed(RecordedEnvironment):
    """Also keeps the seconds until a session's environment is ready."""

    reset_seconds = 0.0

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Start, from the cut if the session is a branch."""
        started = time.perf_counter()
        try:
            await super().reset(task)
        finally:
            self.reset_seconds = time.perf_counter() - started


async def play(
    gateway: Gateway,
    recording: Recording,
    task: SweTask,
    *,
    seed: int,
    environment: Callable[[], Any],
    agent: ReActAgent | None = None,
) -> float:
    """One session, as verl's agent loop plays it; the seconds until its environment was ready.

    Raises `NotForked` for a branch that did not come to its cut.
    """
    resumption = None if recording.fork is None else recording.fork.resumption()
    session = gateway.open_session(sampling={"seed": seed}, resumption=resumption)
    recorded = ResetTimed(environment(), recording)
    done = await run_task(
        agent=agent or ReActAgent(ReActOptions(max_turns=8)),
        environment=recorded,
        endpoint=gateway.endpoint(session),
        task={"swe": task.to_row()},
        messages=to_row(task, 0, "train")["prompt"],
        timeout_seconds=60,
    )
    recording.finish(session.name, (await gateway.close_session(session)).calls, resumption)
    if recording.fault is not None:
        raise NotForked(recording.fault)
    if done.status != "completed" or done.reward is None:
        raise RuntimeError(f"{task.instance_id}: expected a session that ends by itself, received {done}")
    recording.reward = done.reward
    return recorded.reset_seconds


@asynccontextmanager
async def serving(model: DrawingModel) -> AsyncIterator[Gateway]:
    """A gateway in front of the model."""
    options = GatewayOptions(max_context_tokens=20_000, max_turn_tokens=4000)
    async with Gateway(tokenizer=model.tokenizer, backend=model, options=options) as gateway:
        yield gateway


def said(recording: Recording) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]]:
    """What the calls of a session were asked and answered, and the log-probs."""
    return [(call.prompt_ids, call.response_ids, call.log_probs) for call in recording.calls]


async def fork_both_ways(
    gateway: Gateway, model: DrawingModel, number: int, *, seed: int, sandbox: SandboxOptions
) -> dict[str, Any]:
    """One session, and a branch of it from a copy and by repeated calls, as a row of results.

    Args:
        gateway: in front of the model.
        number: of the session; even ones are cut at a token within a turn, odd ones at a turn's start.
        seed: of the study.
    """
    task, rng = model.tasks[number % len(model.tasks)], random.Random(f"{seed} {number}")
    parent, timed = Recording(number=0), SavingTimed(sandbox)
    await play(gateway, parent, task, seed=rng.randrange(1 << 30), environment=lambda: timed)
    nodes = parent.nodes(len(model.tokenizer)).nodes
    node = rng.choice(nodes[1:])
    fork = Fork(parent=parent, token=node.start if number % 2 else rng.randrange(node.start, node.end))
    without = replace(parent, tool_calls=[replace(call, saved=None) for call in parent.tool_calls])
    row = {
        "session": number,
        "task": task.instance_id,
        "turns": len(parent.calls),
        "places": len(nodes),
        "cut_turn": node.turn,
        "calls_before": len(fork.tool_calls),
        "reward": parent.reward,
        "save_s": statistics.mean(timed.save_seconds),
    }
    branch_seed, branches = rng.randrange(1 << 30), {}
    for way, source in (("copy", parent), ("replay", without)):
        branch = Recording(number=1, fork=Fork(parent=source, token=fork.token), copies=False)
        try:
            row[f"{way}_s"] = await play(
                gateway, branch, task, seed=branch_seed, environment=lambda: SweEnvironment(sandbox)
            )
            row[f"{way}_reward"], branches[way] = branch.reward, branch
        except NotForked:
            row[f"{way}_fault"] = branch.fault
        row[f"{way}_repeated_calls"] = branch.replayed_calls
    if len(branches) == 2:
        seen = [(said(one), [call.result for call in one.tool_calls]) for one in branches.values()]
        row |= {"same_reward": row["copy_reward"] == row["replay_reward"], "same_tokens": seen[0] == seen[1]}
        row["left_parent"] = said(branches["copy"]) != said(parent)
    await parent.close()
    return row


async def forked(
    tokenizer: PreTrainedTokenizerBase, kind: str, count: int, *, seed: int = 0, sandbox: SandboxOptions
) -> list[dict[str, Any]]:
    """Rows of sessions one after another.

    Args:
        kind: a key of `RESTLESS`, or any other name for sessions that repeat themselves.
        count: number of sessions.
        seed: of the study.
    """
    model = DrawingModel(tokenizer, build_tasks(), first=RESTLESS.get(kind))
    async with serving(model) as gateway:
        return [
            {"kind": kind, **await fork_both_ways(gateway, model, number, seed=seed, sandbox=sandbox)}
            for number in range(count)
        ]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for the sessions of a kind; seconds are medians."""
    pairs = [row for row in rows if "same_reward" in row]
    refused = sum("repeat itself" in str(row.get("replay_fault")) for row in rows)
    parts = [
        f"{rows[0]['kind']}: {len(rows)} sessions",
        f"branches by copy {sum('copy_reward' in row for row in rows)}",
        f"by replay {sum('replay_reward' in row for row in rows)}, refused as not repeating {refused}",
        f"rewards equal {sum(row['same_reward'] for row in pairs)} of {len(pairs)}",
        f"tokens and results equal {sum(row['same_tokens'] for row in pairs)}",
        f"solved {sum(row['copy_reward'] == 1.0 for row in pairs)}",
        f"unlike their parent {sum(row['left_parent'] for row in pairs)}",
    ]
    for name in ("save_s", "copy_s", "replay_s"):
        seconds = [row[name] for row in rows if name in row]
        if seconds:
            parts.append(f"{name} {statistics.median(seconds):.3f} (to {max(seconds):.3f})")
    return ", ".join(parts)


def main() -> None:
    """Fork, print a line for each kind, write the rows; fails if a reward differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200, help="that repeat themselves")
    parser.add_argument("--restless", type=int, default=20, help="sessions of each kind that may not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path("outputs/copy_and_replay.csv"))
    arguments = parser.parse_args()
    reason = why_no_bubblewrap()
    if reason is not None:
        parser.error(f"copies need bubblewrap: {reason}")
    tokenizer, sandbox = build_swe_tokenizer(), SandboxOptions()
    about, rows = provenance(packages=()), list[dict[str, Any]]()
    for kind, count in {"steady": arguments.sessions, **dict.fromkeys(RESTLESS, arguments.restless)}.items():
        made = asyncio.run(forked(tokenizer, kind, count, seed=arguments.seed, sandbox=sandbox))
        print(summary(made), flush=True)
        rows += made
    collect_rows(rows, about, arguments.csv)
    raise SystemExit(0 if all(row.get("same_reward", True) for row in rows) else 1)


if __name__ == "__main__":
    main()
