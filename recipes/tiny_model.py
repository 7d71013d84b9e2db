"""Builds tiny Qwen-shaped models and tokenizers, so that every recipe and test runs offline on a CPU.

Usage: python recipes/tiny_model.py DIRECTORY [--seed 0]
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(
    template: str = CHAT_TEMPLATE,
    *,
    special: Iterable[str] = SPECIAL,
    added: Iterable[str] = (),
    texts: Iterable[str] | None = None,
    vocab_size: int = 2000,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with Qwen's special tokens; `<|im_end|>` ends a turn.

    Args:
        template: chat template.
        special: special tokens, first in the vocabulary.
        added: further tokens behind the vocabulary.
        texts: BPE learns its merges from these; None gives one token per byte.
        vocab_size: upper bound, `added` not counted, if there are texts.
        pre_tokenizer: replaces the byte-level one.
    """
    alphabet, special = sorted(pre_tokenizers.ByteLevel.alphabet()), list(special)
    if texts is None:
        vocabulary = {piece: index for index, piece in enumerate([*special, *alphabet])}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    else:
        backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if texts is not None:
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(special)
    backend.add_tokens(list(added))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = template
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    width: int = 64,
    config_class: type[PretrainedConfig] = Qwen3Config,
    **more: Any,
) -> PreTrainedModel:
    """Build a model of two layers with random weights, float32.

    Args:
        tokenizer: gives vocabulary size, end and padding ids.
        seed: of the weights.
        width: hidden size, a multiple of 4.
        config_class: of the model family.
        more: entries of the config, besides or instead of ours.
    """
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    return AutoModelForCausalLM.from_config(config_class(**{**sizes, **more}))


def directory_and_seed(description: str | None) -> argparse.Namespace:
    """Read the command line of a script that writes a model: `directory` and `seed`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write model and tokenizer to the directory."""
    arguments = directory_and_seed(__doc__)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(arguments.directory)
    build_model(tokenizer, seed=arguments.seed).save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
