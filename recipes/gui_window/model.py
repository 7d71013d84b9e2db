"""Builds a tiny Qwen2.5-VL with its processor, and shows it some screens, so that it starts with some skill.

Usage: PYTHONPATH=recipes python -m gui_window.model DIRECTORY [--seed 0] [--shown 50]
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gui_window.processor import Qwen2_5_VLProcessor
from gui_window.screens import ASKED, Screens, conversation
from tiny_model import SPECIAL, build_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BATCH = 16


def build_processor() -> Qwen2_5_VLProcessor:
    """Build tokenizer and processor: patches of 4 x 4 pixels, four of them make an image token."""
    tokenizer = build_tokenizer(CHAT_TEMPLATE, special=(*SPECIAL, *IMAGE))
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
    return Qwen2_5_VLProcessor(image_processor=images, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE)


def build_model(processor: Any, *, seed: int) -> Any:
    """Build the model with random weights, float32."""
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")
    } | {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.05,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [0],
        "out_hidden_size": text["hidden_size"],
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32", **ids
    )
    return AutoModelForImageTextToText.from_config(config)


def show(model: Any, processor: Any, *, steps: int, seed: int) -> None:
    """Train on the last click of sessions that click right; `seed` is the first's, and every session has another."""
    loss = torch.tensor(float("nan"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        # Conversations of a batch have equal length.
        shown = [_session(seed + step * BATCH + number, clicks=1 + step % 2) for number in range(BATCH)]
        texts = [processor.apply_chat_template(messages, tokenize=False) for messages, _ in shown]
        pictures = [picture for _, screens in shown for picture in screens]
        inputs = processor(text=texts, images=pictures, return_tensors="pt")
        logits = model(**inputs).logits
        # The last turn ends with its letter, <|im_end|> and a line break.
        loss = cross_entropy(logits[:, -4:-2].flatten(0, 1), inputs["input_ids"][:, -3:-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss after {steps} steps of {BATCH} screens: {loss.item():.3f}")


def _session(seed: int, *, clicks: int) -> tuple[list[dict[str, Any]], list[Any]]:
    screens, pictures, said = Screens(seed, clicks), [], []
    while not screens.is_over:
        pictures.append(screens.screenshot())
        said.append(screens.target)
        screens.click(said[-1])
    return conversation(said), pictures


def save(folder: Path, *, shown: int, seed: int) -> None:
    """Write model, tokenizer and processor, whose code transformers copies, after `shown` supervised steps."""
    processor = build_processor()
    model = build_model(processor, seed=seed)
    show(model, processor, steps=shown, seed=1_000_000)
    Qwen2_5_VLProcessor.register_for_auto_class()
    processor.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    """Write model, processor and tasks to the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shown", type=int, default=50)
    arguments = parser.parse_args()
    save(arguments.directory / "model", shown=arguments.shown, seed=arguments.seed)
    rows = [
        {
            "data_source": "gui_window",
            "prompt": [{"role": "user", "content": ASKED}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "seed": index},
        }
        for index in range(512)
    ]
    pd.DataFrame(rows).to_parquet(arguments.directory / "tasks.parquet")


if __name__ == "__main__":
    main()
