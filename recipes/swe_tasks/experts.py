"""Demonstrations for a warm start: the reference repairs, played through the gateway, as rows that RL would see.

Usage: PYTHONPATH=recipes/swe_tasks python recipes/swe_tasks/experts.py MODEL OUTPUT.parquet [--tasks 31] [--think]

Every session really runs: native agent, gateway, sandbox, tests, and must end with reward 1. Train on the rows with
recipes/sft (`data.custom_cls` of tree_rl.verl_plugin.sft.token_rows_dataset).
"""

import argparse
import asyncio
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from generate import build_tasks, split_of, to_row
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions, Reasoning
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.transcript import rows_of_calls

AT_ONCE = 8


def edit_command(path: str, wrong: str, right: str) -> str:
    """A command that replaces the lines in which two versions of a file differ."""
    old, new = wrong.splitlines(), right.splitlines()
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    changes = [span for kind, *span in matcher.get_opcodes() if kind != "equal"]
    start, stop = changes[0][0], changes[-1][1]
    replacement = "\n".join(new[changes[0][2] : changes[-1][3]])
    if stop == start:
        return f"sed -i '{start}r /dev/stdin' {path} <<'END'\n{replacement}\nEND"
    return f"sed -i -e '{stop}r /dev/stdin' -e '{start + 1},{stop}d' {path} <<'END'\n{replacement}\nEND"


def write_command(files: Mapping[str, str]) -> str:
    """A command that writes files; their texts end with a line feed."""
    return "\n".join(f"cat > {path} <<'END-OF-FILE'\n{text}END-OF-FILE" for path, text in files.items())


def turns_of(task: SweTask, *, think: bool = False) -> list[str]:
    """What the expert says, turn by turn; with `think`, after a sentence of reasoning that the agent cuts out."""
    changed = list(task.solution_files)
    edits = "\n".join(edit_command(path, task.files[path], task.solution_files[path]) for path in changed)
    turns = [shell(f"cat {' '.join(changed)}"), shell(edits), "The issue is solved."]
    if not think:
        return turns
    names = " and ".join(changed)
    thoughts = [f"The issue is about {names}.", f"I see what is wrong in {names}.", f"{names} is repaired."]
    return [f"<think>\n{thought}\n</think>\n{turn}" for thought, turn in zip(thoughts, turns, strict=True)]


def shell(command: str) -> str:
    """A turn that calls the shell."""
    return f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'command': command}})}\n</tool_call>"


class Expert:
    """A backend that plays one task's turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[SweTask], *, think: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._think = think

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Write the next turn of the task whose statement stands in the prompt."""
        prompt = self._tokenizer.decode(list(prompt_ids))
        (task,) = [task for task in self._tasks if task.problem_statement in prompt]
        turn = turns_of(task, think=self._think)[prompt.count("<|im_start|>assistant") - 1]
        ids = [*self._tokenizer.encode(turn, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Generation(token_ids=tuple(ids), log_probs=None, finish_reason="stop")


async def play(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[SweTask],
    *,
    think: bool = False,
    sandbox: SandboxOptions | None = None,
) -> list[dict[str, Any]]:
    """Play every task once, and return the rows. Raises `RuntimeError` for a session without reward 1.

    Args:
        think: reason before every turn; the agent cuts reasoning out of its history, so every turn is a row.
    """
    reasoning: Reasoning = "inline" if think else "field"
    options = GatewayOptions(max_context_tokens=32_768, max_turn_tokens=8192, reasoning=reasoning)
    free = asyncio.Semaphore(AT_ONCE)

    async def play_one(gateway: Gateway, task: SweTask) -> list[dict[str, Any]]:
        async with free:
            session = gateway.open_session()
            done = await run_task(
                agent=ReActAgent(ReActOptions(think="strip" if think else "keep")),
                environment=SweEnvironment(sandbox),
                endpoint=gateway.endpoint(session),
                task={"swe": task.to_row()},
                messages=to_row(task, 0, "train")["prompt"],
                timeout_seconds=120,
            )
            record = await gateway.close_session(session)
        if done.reward != 1.0:
            raise RuntimeError(f"{task.instance_id}: expected reward 1 of the reference repair, received {done}")
        return [
            {
                "input_ids": list(row.token_ids),
                "loss_mask": [0] * len(row.prompt_ids) + list(row.response_mask),
                "conversation": task.instance_id,
            }
            for row in rows_of_calls(record.calls)
        ]

    backend = Expert(tokenizer, tasks, think=think)
    async with Gateway(tokenizer=tokenizer, backend=backend, options=options) as gateway:
        played = await asyncio.gather(*[play_one(gateway, task) for task in tasks])
    return [row for rows in played for row in rows]


def main() -> None:
    """Write the rows of the training tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or name of the model whose tokenizer writes the rows")
    parser.add_argument("output", type=Path)
    parser.add_argument("--tasks", type=int, default=None, help="the first so many; all by default")
    parser.add_argument("--think", action="store_true", help="reason before every turn, for an agent with think=strip")
    parser.add_argument("--sandbox", type=json.loads, default={}, help="fields of SandboxOptions, as JSON")
    arguments = parser.parse_args()
    tasks = [task for task, split in split_of(build_tasks()) if split == "train"][: arguments.tasks]
    tokenizer, sandbox = AutoTokenizer.from_pretrained(arguments.model), SandboxOptions(**arguments.sandbox)
    rows = asyncio.run(play(tokenizer, tasks, think=arguments.think, sandbox=sandbox))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(arguments.output)
    lengths = [len(row["input_ids"]) for row in rows]
    print(f"{len(rows)} rows of {len(tasks)} tasks, {min(lengths)} to {max(lengths)} tokens, in {arguments.output}")


if __name__ == "__main__":
    main()
