"""What a run reads, made on the machine: a random model, a tokenizer of its vocabulary, prompts, the agent loop.

`python -m scripted_steps.inputs SIZE LAYERS FOLDER` writes a model in a process that gives its GPU memory back.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
import torch
from tiny_model import CHAT_TEMPLATE, SPECIAL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tree_rl.benchmark.against_verl.engines import save_random_model
from tree_rl.cost.model_sizes import MODEL_SIZES, ModelSize

AGENT = "scripted"
PROMPTS, AGENT_LOOPS = "prompts.parquet", "agent_loops.yaml"
"""Files in the folder of a run."""


def save_model(size: ModelSize, folder: Path) -> None:
    """Write random weights and a tokenizer of as many tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    save_random_model(size, folder, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    build_tokenizer(size.shape.vocab).save_pretrained(folder)


def build_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One token per byte and Qwen's special tokens; the other ids are words that no text has."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<unused {index}>" for index in range(vocab - len(pieces))]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_inputs(folder: Path, groups: int, settings: Mapping[str, Any]) -> None:
    """Write verl's data set and its list of agent loops, with the loop's own arguments.

    Prompts only have a number, since the script has their tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": str(index)}],
            "data_source": "script",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
            "agent_name": AGENT,
        }
        for index in range(groups)
    ]
    pandas.DataFrame(rows).to_parquet(folder / PROMPTS)
    loop = "scripted_steps.scripted_agent_loop.ScriptedAgentLoop"
    # JSON is YAML.
    (folder / AGENT_LOOPS).write_text(json.dumps([{"name": AGENT, "_target_": loop, **settings}]))


if __name__ == "__main__":
    save_model(MODEL_SIZES[sys.argv[1]].with_layers(int(sys.argv[2])), Path(sys.argv[3]))
