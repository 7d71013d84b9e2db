"""A task that a random model can learn in minutes: answer in digits. Data for RL, SFT and DPO, and the reward.

Usage: python recipes/toy_task.py DIRECTORY [--prompts 256] [--conversations 64]
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pandas as pd

SYSTEM = "You are a counter. Whatever you are asked, answer with digits and nothing else."


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """Share of the answer's characters that are digits; verl calls it for every session."""
    answer = solution_str.removesuffix("<|im_end|>")
    return sum(character in "0123456789" for character in answer) / max(len(answer), 1)


def prompt_row(index: int, generator: random.Random) -> dict[str, Any]:
    """One prompt as verl's RL dataset reads it."""
    number = generator.randrange(10, 100)
    question = {"role": "user", "content": f"Count on from {number}."}
    return {
        "data_source": "toy_digits",
        "prompt": [{"role": "system", "content": SYSTEM}, question],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": index},
    }


def conversation_rows(index: int, generator: random.Random, turns: int = 4) -> list[dict[str, Any]]:
    """One conversation as one row per turn: every row begins with all turns before it."""
    messages = [{"role": "system", "content": SYSTEM}]
    rows = []
    for _ in range(turns):
        number = generator.randrange(10, 100)
        messages = [*messages, {"role": "user", "content": f"Count on from {number}."}]
        messages = [*messages, {"role": "assistant", "content": "".join(str(number + step) for step in range(1, 5))}]
        rows.append({"messages": messages, "conversation": f"c{index}"})
    return rows


def preference_rows(prompt: dict[str, Any], generator: random.Random, pairs: int = 4) -> list[dict[str, Any]]:
    """Pairs of one prompt: an answer in digits is chosen, one in words rejected."""
    number = int(prompt["reward_model"]["ground_truth"])
    digits = "".join(str(number + step) for step in range(4))
    words = [" ".join(generator.choices(["one", "two", "three", "and", "so", "on"], k=4)) for _ in range(pairs)]
    answers = [[{"role": "assistant", "content": text}] for text in (digits, *words)]
    return [{"prompt": prompt["prompt"], "chosen": answers[0], "rejected": other} for other in answers[1:]]


def main() -> None:
    """Write train.parquet, test.parquet, sft.parquet and dpo.parquet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--conversations", type=int, default=64)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    prompts = [prompt_row(index, generator) for index in range(arguments.prompts)]
    pd.DataFrame(prompts).to_parquet(arguments.directory / "train.parquet")
    pd.DataFrame(prompts[:16]).to_parquet(arguments.directory / "test.parquet")
    rows = [row for index in range(arguments.conversations) for row in conversation_rows(index, generator)]
    pd.DataFrame(rows).to_parquet(arguments.directory / "sft.parquet")
    pairs = [pair for prompt in prompts[:64] for pair in preference_rows(prompt, generator)]
    pd.DataFrame(pairs).to_parquet(arguments.directory / "dpo.parquet")


if __name__ == "__main__":
    main()
