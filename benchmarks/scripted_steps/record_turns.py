"""Counts the tokens of recorded agents' turns for `session_scripts.py`.

python examples/write_qwen_tokenizer.py outputs/qwen_tokenizer
python benchmarks/scripted_steps/record_turns.py examples/tau_bench_airline/trajectories.json outputs/qwen_tokenizer
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

MARKUP_TOKENS = 5
"""Around each message in Qwen's chat template."""


def main() -> None:
    """Write airline_turns.json beside this file: prompts with the turns of each trial."""
    trajectories = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])

    def tokens(message: dict[str, Any]) -> int:
        text = message.get("content") or ""
        calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())
        return len(tokenizer.encode(text + calls)) + MARKUP_TOKENS

    tasks: dict[int, dict[str, Any]] = {}
    for trajectory in trajectories:
        messages = trajectory["traj"]
        first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        task = tasks.setdefault(trajectory["task_id"], {"prompt": sum(map(tokens, messages[:first])), "sessions": []})
        turns: list[list[int]] = []
        for message in messages[first:]:
            if message["role"] == "assistant":
                turns.append([tokens(message), 0])
            else:
                turns[-1][1] += tokens(message)
        task["sessions"].append(turns)
    lines = ",\n".join(json.dumps(tasks[task], separators=(",", ":")) for task in sorted(tasks))
    Path(__file__).with_name("airline_turns.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
