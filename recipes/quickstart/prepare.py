"""Writes what the quickstart starts from: tokenizer, untrained model, demonstrations, and the tasks of GRPO."""

import asyncio
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
from quickstart.experts import DONE, Demonstration, Play, act, demonstrate, draw_plays
from quickstart.model import build_model
from quickstart.task import REPORT, ROOMS, ROOMS_ASKED, StockEnvironment, draw_task, first_messages
from quickstart.tokenizer import build_tokenizer
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.transcript import rows_of_calls

TASKS = 512
"""Prompts of GRPO."""
PROCESSES = 2
"""In which experts play."""


def task_words() -> list[str]:
    """Return text that contains every word of the task, for the tokenizer to learn."""
    tool = StockEnvironment().tools()[0]["function"]
    texts = [
        f"system\n{first_messages({'rooms': ROOMS})[0]['content']}\n# Tools\n{tool['name']}: {tool['description']}\n"
    ]
    for shift in range(10):
        rooms = [ROOMS[(shift + place) % len(ROOMS)] for place in range(ROOMS_ASKED)]
        found = " ".join(f"{room} {(shift + place) % 10}" for place, room in enumerate(rooms))
        texts += [
            f"user\n{first_messages({'rooms': rooms})[1]['content']}\nassistant\n{DONE}",
            act(f"read {' '.join(rooms)}", [f"cat {room}.txt" for room in rooms]),
            act(f"stock: {found}", [f"echo {found} > {REPORT}"]),
            "\n".join(rooms),
        ]
    return texts


def demonstration_table(records: list[Demonstration]) -> pd.DataFrame:
    """Cut sessions into rows as the rollout does; `loss_mask` is 1 on the expert's tokens."""
    return pd.DataFrame(
        {
            "conversation": conversation,
            "input_ids": np.array(row.token_ids, dtype=np.int64),
            "loss_mask": np.array([0] * len(row.prompt_ids) + list(row.response_mask), dtype=np.int64),
            "reward": record.done.reward,
        }
        for conversation, record in enumerate(records)
        for row in rows_of_calls(record.calls)
    )


def prompt_table(count: int, *, seed: int) -> pd.DataFrame:
    """Draw the tasks of GRPO, in verl's columns."""
    random_source = random.Random(seed)
    tasks = [{**draw_task(random_source), "index": index} for index in range(count)]
    return pd.DataFrame(
        {
            "prompt": [first_messages(task) for task in tasks],
            "data_source": "quickstart",
            "reward_model": [{"style": "rule", "ground_truth": ""} for _ in tasks],
            "extra_info": tasks,
        }
    )


def play_all(plays: list[Play], tokenizer: PreTrainedTokenizerFast) -> list[Demonstration]:
    """Record demonstrations, in a process of its own."""
    return asyncio.run(demonstrate(plays, tokenizer))


def prepare(folder: Path, *, seed: int, demonstrations: int) -> None:
    """Write `model/`, `demonstrations.parquet` and `tasks.parquet` into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(task_words())
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=seed).save_pretrained(folder / "model")
    plays = draw_plays(demonstrations, seed=seed)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        parts = pool.map(partial(play_all, tokenizer=tokenizer), [plays[part::PROCESSES] for part in range(PROCESSES)])
        records = [record for part in parts for record in part]
    table = demonstration_table(records)
    table.to_parquet(folder / "demonstrations.parquet")
    prompt_table(TASKS, seed=seed + 1).to_parquet(folder / "tasks.parquet")
    print(
        f"{len(records)} demonstrations, {len(table)} rows, mean reward "
        f"{np.mean([record.done.reward for record in records]):.2f}, vocabulary {len(tokenizer)}"
    )
