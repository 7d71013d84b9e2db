"""Writes a Qwen3 of 25 M parameters with random weights, head size 64 as vLLM's kernels need, and a tokenizer of bytes.

Usage: python recipes/gpu_first_run/random_model.py DIRECTORY [--seed 0]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_model


def main() -> None:
    """Write model and tokenizer to the directory."""
    arguments = tiny_model.directory_and_seed(__doc__)
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.save_pretrained(arguments.directory)
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    # verl lets vLLM draw no token that the tokenizer lacks; random weights would give it a share of the softmax.
    sizes["vocab_size"] = len(tokenizer)
    tiny_model.build_model(tokenizer, seed=arguments.seed, width=512, **sizes).save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
