"""Rows that real harnesses leave: groups of attempts at one task, recorded by the gateway.

Usage: python benchmarks/harness_rows.py FOLDER [--csv FILE] [--cases NAME ...] [--at-once N] [--tokenizer FOLDER]

Each attempt of a case is one session of an unmodified harness in a sandbox with its own full prompt. A scripted model
answers: every attempt says other things from its first word on, and reads other parts of Python's library by real shell
commands. Written are FOLDER/CASE.parquet, with the rows as the gateway stores them (a call that only appends is no row
of its own), and a line of the CSV. A harness that is not on the PATH is left out by name.
"""

import argparse
import asyncio
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "swe_tasks"))
sys.path.insert(0, str(Path(__file__).parent / "agents"))

import pyarrow as pa
import pyarrow.parquet as pq
from generate import build_tasks, to_row
from matrix import SHELLS, harness_version
from scripted_model import HERMES, Dialect
from transformers import AutoTokenizer

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import read_csv, write_csv
from tree_rl.rollout.agents.agents_by_name import build
from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.openai_responses.tools import NAMESPACE_MARK
from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls
from tree_rl.tree import Forest

ROOT = Path(__file__).parents[1]
SECONDS = 1500
LIBRARY = Path("/usr/lib")
"""The model reads Python's library there, which sandboxes show."""
WORDS = {"turn": (15, 60), "thought": (80, 300), "summary": (500, 900), "answer": (80, 200)}
"""Fewest and most words of what the model says."""
TASK = re.compile(r"\[walk ([\w-]+) (\d+)\]")
SUMMARY = re.compile(r"create a detailed summary of the conversation|CONTEXT CHECKPOINT COMPACTION|anchored summary")
"""What harnesses ask for when they compact."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
STARTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "claude_code": ("Agent", {"subagent_type": "general-purpose"}),
    "opencode": ("task", {"subagent_type": "general"}),
}
"""Harness -> the tool that starts a sub-agent, and what kind it starts."""
STARTED = re.compile(r'"agent_id":\s*"([\w-]+)"')
"""What Codex says of a sub-agent that it started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A group of attempts."""

    what: str
    harness: str
    attempts: int
    steps: int
    """Shell commands of an attempt."""
    lines: tuple[int, int] = (12, 150)
    """Fewest and most lines that a step reads: some 100 to 1,600 tokens."""
    sub_agents: int = 0
    """Steps of each of two sub-agents that start together at the third step; 0: none start."""
    thinks: bool = False
    """The model thinks before each turn, and its template, as Qwen3's, drops thoughts before the latest question."""
    arguments: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the harness."""


CLAUDE_CODE_COMPACTS = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "75"}
"""Claude Code compacts at so many per cent of its window less 20,000 tokens for an answer. Behind the summary it shows
files again that were read last, some 20,000 tokens: a smaller window fills at once, and it gives up."""
CODEX_COMPACTS = "-c model_context_window=36000 -c model_auto_compact_token_limit=26000"
CASES: Mapping[str, Case] = {
    "claude_code_attempts": Case(what="parallel attempts", harness="claude_code", attempts=8, steps=30),
    "codex_attempts": Case(what="parallel attempts", harness="codex", attempts=16, steps=20),
    "opencode_attempts": Case(what="parallel attempts", harness="opencode", attempts=16, steps=20),
    "qwen_code_attempts": Case(what="parallel attempts", harness="qwen_code", attempts=16, steps=20),
    "claude_code_sub_agents": Case(
        what="two sub-agents each", harness="claude_code", attempts=8, steps=18, sub_agents=6
    ),
    "codex_sub_agents": Case(what="two sub-agents each", harness="codex", attempts=8, steps=20, sub_agents=8),
    "claude_code_compacts": Case(
        what="compaction", harness="claude_code", attempts=4, steps=40, lines=(40, 190), variables=CLAUDE_CODE_COMPACTS
    ),
    "codex_compacts": Case(what="compaction", harness="codex", attempts=5, steps=36, arguments=CODEX_COMPACTS),
    "mini_swe_thinks": Case(
        what="the template drops earlier thoughts", harness="mini_swe", attempts=4, steps=20, thinks=True
    ),
}


@cache
def english() -> list[str]:
    """Words of Python's manual."""
    return " ".join(topics.values()).split()


@cache
def library() -> list[tuple[Path, int]]:
    """Files of Python's library, and how many lines each has."""
    files = [(path, path.read_text(errors="replace").count("\n")) for path in sorted(LIBRARY.glob("python3.*/*.py"))]
    return [(path, lines) for path, lines in files if lines > 300]


def task_mark(name: str, steps: int) -> str:
    """Ask an agent for so many steps."""
    return f"[walk {name} {steps}]"


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A model that finds its way by its prompt alone: sub-agents run at once, and it goes on behind a summary."""

    dialect: Dialect
    case: Case
    seed: int

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Say the next turn."""
        tokenizer = self.dialect.tokenizer
        text = self._turn(tokenizer.decode(list(prompt_ids)))
        ids = tuple(tokenizer.encode(text, add_special_tokens=False)[:max_tokens])
        return Generation(token_ids=ids, log_probs=None, finish_reason="stop")

    def _turn(self, prompt: str) -> str:
        task = TASK.search(prompt)
        if task is None:
            return self.dialect.writes("A title")
        name, steps = task[1], int(task[2])
        walked = max((int(step) for step in re.findall(rf"\[step (\d+) of {name}\]", prompt)), default=0)
        draw = random.Random(f"{self.seed} {name} {walked} {prompt.count('<|im_start|>')}")
        if SUMMARY.search(prompt[prompt.rfind("<|im_start|>user") :]):
            mark = f"{task_mark(name, steps)} [step {walked} of {name}]"
            return self.dialect.writes(f"<summary>{_prose(draw, 'summary')}\n{mark}</summary>")
        thought = f"<think>\n{_prose(draw, 'thought')}\n</think>\n\n" if self.case.thinks else ""
        if walked >= steps:
            if self.case.harness == "mini_swe":
                return self.dialect.writes(f"{thought}{_block(SUBMIT)}")
            return self.dialect.writes(f"{thought}{_prose(draw, 'answer')}")
        said = f"{thought}{_prose(draw, 'turn')}"
        command = _command(draw, f"[step {walked + 1} of {name}]", self.case.lines)
        if self.case.harness == "mini_swe":
            return self.dialect.writes(f"{said}\n\n{_block(command)}")
        calls = [SHELLS[self.case.harness].call(command)]
        if self.case.sub_agents and "-" not in name:
            calls = self._started(draw, prompt, walked + 1, name) or calls
        return _with_calls(self.dialect, said, calls)

    def _started(
        self, draw: random.Random, prompt: str, step: int, name: str
    ) -> list[tuple[str, Mapping[str, Any]]] | None:
        """Calls that start two sub-agents in one turn, and Codex's that wait for them."""
        harness, mark = self.case.harness, f"[step {step} of {name}]"
        asked = [f"{_prose(draw, 'turn')} {task_mark(f'{name}-{letter}', self.case.sub_agents)}" for letter in "ab"]
        spawn, wait = (f"multi_agent_v1{NAMESPACE_MARK}{call}" for call in ("spawn_agent", "wait_agent"))
        if step == 3 and harness == "codex":
            return [(spawn, {"message": f"{one} {mark}"}) for one in asked]
        if step == 3:
            tool, how = STARTS[harness]
            return [(tool, {"description": mark, "prompt": one, **how}) for one in asked]
        if step == 4 and harness == "codex":
            return [
                (wait, {"targets": STARTED.findall(prompt)}),
                SHELLS[harness].call(_command(draw, mark, self.case.lines)),
            ]
        return None


def _prose(draw: random.Random, kind: str) -> str:
    words, count = english(), draw.randint(*WORDS[kind])
    first = draw.randrange(len(words) - count)
    # Template and clients read these marks.
    return " ".join(words[first : first + count]).replace("<", "(").replace("`", "'")


def _command(draw: random.Random, mark: str, read: tuple[int, int]) -> str:
    path, lines = draw.choice(library())
    count = draw.randint(*read)
    first = draw.randint(1, lines - count)
    return f"echo '{mark}'; sed -n {first},{first + count}p {path}"


def _block(command: str) -> str:
    return f"```mswea_bash_command\n{command}\n```"


def _with_calls(dialect: Dialect, said: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A turn with one call or several."""
    first, *others = [dialect.writes(said if place == 0 else "", call) for place, call in enumerate(calls)]
    end = dialect.call_end
    more = [one[one.index("<tool_call>") :].removesuffix(end) for one in others]
    return "\n".join([first.removesuffix(end), *more]) + end


def dialect_of(folder: Path, *, thinks: bool) -> Dialect:
    """Qwen's tokenizer, with the template of its models that think, or its own."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if thinks:
        tokenizer.chat_template = HERMES.read_text()
    return Dialect(name="hermes", tokenizer=tokenizer, call_end="<|im_end|>", answer_end="<|im_end|>")


async def attempt(case: Case, dialect: Dialect, seed: int) -> Sequence[ModelCall]:
    """The calls of one session. Raises `ValueError` if the harness is not installed."""
    given = (
        {"max_turns": 2 * case.steps}
        if case.harness == "mini_swe"
        else {"arguments": case.arguments, "variables": case.variables}
    )
    agent, environment = build(case.harness, given, "swe", {})
    task = build_tasks()[0]
    asked = to_row(task, 0, "train")["prompt"]
    asked[-1]["content"] += "\n\n" + task_mark("main", case.steps)
    options = GatewayOptions(max_context_tokens=262_144, max_turn_tokens=8192)
    model = Attempt(dialect=dialect, case=case, seed=seed)
    async with Gateway(tokenizer=dialect.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        done = await run_task(
            agent=agent,
            environment=environment,
            endpoint=gateway.endpoint(session),
            task={"swe": task.to_row()},
            messages=asked,
            timeout_seconds=SECONDS,
        )
        record = await gateway.close_session(session)
    if done.status != "completed":
        raise RuntimeError(f"attempt {seed} of {case.harness}: {done.status}, {done.detail}")
    return record.calls


async def group(case: Case, dialect: Dialect, at_once: int) -> list[Sequence[ModelCall]]:
    """All attempts, so many at a time."""
    free = asyncio.Semaphore(at_once)

    async def one(seed: int) -> Sequence[ModelCall]:
        async with free:
            return await attempt(case, dialect, seed)

    return list(await asyncio.gather(*(one(seed) for seed in range(case.attempts))))


def write_rows(path: Path, sessions: Sequence[Sequence[Row]]) -> None:
    """Write what `tree-rl inspect` and `tree-rl bench --data` read; `--group-by session` looks at single sessions."""
    rows = [row for own in sessions for row in own]
    masks = [[0] * len(row.prompt_ids) + list(row.response_mask) for row in rows]
    table = {
        "input_ids": pa.array([list(row.token_ids) for row in rows], pa.list_(pa.int32())),
        "response_mask": pa.array(masks, pa.list_(pa.int8())),
        "uid": [path.stem] * len(rows),
        "session": [str(number) for number, own in enumerate(sessions) for _ in own],
    }
    pq.write_table(pa.table(table), path, compression="zstd", compression_level=19)


def play(name: str, folder: Path, tokenizer: Path, at_once: int) -> dict[str, Any]:
    """Record a case; returns its line of the CSV."""
    case = CASES[name]
    played = asyncio.run(group(case, dialect_of(tokenizer, thinks=case.thinks), at_once))
    sessions = [rows_of_calls(calls) for calls in played]
    rows = [row for own in sessions for row in own]
    path = folder / f"{name}.parquet"
    write_rows(path, sessions)
    tokens, unique = sum(len(row.token_ids) for row in rows), _unique(rows)
    return {
        "case": name,
        "what": case.what,
        "harness": case.harness,
        "version": harness_version(case.harness),
        "sessions": case.attempts,
        "calls": sum(map(len, played)),
        "summaries": sum(call.side == "summary" for calls in played for call in calls),
        "rows": len(rows),
        "tokens": tokens,
        "trained_tokens": sum(sum(row.response_mask) for row in rows),
        "unique_tokens": unique,
        "por": 1 - unique / tokens,
        "por_within_sessions": 1 - sum(_unique(own) for own in sessions) / tokens,
        "bound": tokens / unique,
        "longest_row": max(len(row.token_ids) for row in rows),
        "shared_prompt": _shared([max(own, key=lambda row: len(row.token_ids)) for own in sessions]),
        "command": f"python benchmarks/harness_rows.py {folder.name} --cases {name}",
        **{key: value for key, value in provenance(packages=()).items() if key != "device"},
    }


def _unique(rows: Sequence[Row]) -> int:
    return Forest.from_rows([list(row.token_ids) for row in rows]).num_unique


def _shared(rows: Sequence[Row]) -> int:
    """Number of tokens with which all rows begin: neighbours in depth-first order share at least these."""
    return int(Forest.from_rows([list(row.token_ids) for row in rows]).row_order.shared[1:].min())


def main() -> None:
    """Record the cases, one after the other, and write a line of the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the row files")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--at-once", type=int, default=4, help="attempts at a time")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "outputs" / "qwen_tokenizer")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases:
        try:
            line = play(name, arguments.folder, arguments.tokenizer, arguments.at_once)
        except (ValueError, RuntimeError) as error:
            print(f"{name}: {error}")
            continue
        print(*(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in line.items()))
        if arguments.csv is not None:
            others = [row for row in read_csv(arguments.csv) if row["case"] != name]
            write_csv(arguments.csv, sorted([*others, line], key=lambda row: list(CASES).index(row["case"])))


if __name__ == "__main__":
    main()
