"""The embedded rollout engine reads images: log-probs are those of the trainer's; its cache tells images apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_harness import build_engine
from equivalence import infer
from image_batches import picture_batch
from image_rows import IMAGE_TOKEN, SHAPES, Picture, PictureRow, row, text
from transformers import AutoModelForImageTextToText

from tree_rl.models.text_forward import use_language_model
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.embedded_rollout.decode import DecodeEngine, Request
from tree_rl.verl_plugin.embedded_rollout.grouped_attention import GROUPED_SDPA
from tree_rl.verl_plugin.embedded_rollout.prompt_images import PromptImages
from tree_rl.verl_plugin.embedded_rollout.sampling import Sampling
from tree_rl.verl_plugin.options import TreeConfig

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_vl_moe")
ATTENTION = {"": "sdpa", "text_config": GROUPED_SDPA, "vision_config": "sdpa"}
PROMPTS = [one for rows in SHAPES.values() for one in rows if not one.has_neighbours]


def decode_engine(path: Path) -> DecodeEngine:
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=ATTENTION)
    use_language_model(model)
    return DecodeEngine(model, capacity_tokens=64)


def answers(engine: DecodeEngine, prompts: list[PictureRow], seed: int = 0) -> list[Request]:
    requests = []
    for number, one in enumerate(prompts, seed):
        images = PromptImages.of(engine.model, one.tokens, one.pixel_values, one.grid_thw) if one.pictures else None
        requests.append(engine.request(one.tokens, Sampling(max_tokens=6, seed=number), images))
    while not engine.is_idle:
        engine.step()
    return requests


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_trainers_engine(image_models: dict[str, Path], family: str) -> None:
    engine = decode_engine(image_models[family])
    together = answers(engine, PROMPTS)
    # Again, so that prompts continue what the cache holds, also from within an image.
    again = answers(engine, PROMPTS, seed=100)
    ends = ((request.token_ids, [92], Picture(seed=9), [93, 5]) for request in together)
    next_turns = [replace(one, pieces=(*one.pieces, *end)) for one, end in zip(PROMPTS, ends, strict=True)]
    longer = [answers(engine, [one])[0] for one in next_turns]
    assert sum(request.cached_tokens for request in again) > sum(request.cached_tokens for request in together)
    requests, prompts = [*together, *again, *longer], [*PROMPTS, *PROMPTS, *next_turns]
    rows = [replace(one, pieces=(*one.pieces, asked.token_ids)) for one, asked in zip(prompts, requests, strict=True)]
    data = picture_batch(AutoModelForImageTextToText.from_pretrained(image_models[family]), rows)
    trained = infer(build_engine(image_models[family], tree=TreeConfig(mode="tree")), data)["log_probs"].unbind()
    for request, log_probs in zip(requests, trained, strict=True):
        assert IMAGE_TOKEN not in request.token_ids
        # The last position has nothing to predict.
        expected = log_probs[-1 - len(request.token_ids) : -1]
        torch.testing.assert_close(torch.tensor(request.log_probs), expected, rtol=2e-5, atol=2e-5)


def test_prompts_with_equal_ids_share_only_tokens_before_another_image(image_models: dict[str, Path]) -> None:
    engine = decode_engine(image_models["qwen3_vl"])
    trunk, end = text(1, 5), text(2, 4)
    rows = [row(trunk, Picture(seed=seed), end) for seed in (1, 2, 1)]
    assert rows[0].tokens == rows[1].tokens
    rows.append(row(trunk, Picture(seed=1, width=8, height=2), end))
    cached = [answers(engine, [one])[0].cached_tokens for one in rows]
    assert cached == [0, len(trunk), len(rows[0].tokens) - 1, len(trunk)]


def test_features_are_computed_once_per_image_until_the_weights_change(image_models: dict[str, Path]) -> None:
    engine, seen = decode_engine(image_models["qwen3_vl"]), []
    engine.model.base_model.visual.register_forward_pre_hook(lambda *_: seen.append(1))
    one = row(text(1, 5), Picture(seed=1), text(2, 4), Picture(seed=2), text(3, 2), Picture(seed=1), text(4, 2))
    for number in range(3):
        answers(engine, [replace(one, pieces=(text(20 + number, 3), *one.pieces))])
    assert len(seen) == 2
    engine.forget_prefixes()
    answers(engine, [one])
    assert len(seen) == 4


def test_tokens_of_images_are_never_drawn_and_log_probs_count_them(image_models: dict[str, Path]) -> None:
    engine = decode_engine(image_models["qwen3_vl"])
    with torch.no_grad():
        engine.model.get_output_embeddings().weight.zero_()
    requests = answers(engine, [row(text(seed, 5)) for seed in range(200)])
    drawn = np.concatenate([request.token_ids for request in requests])
    assert not np.isin(drawn, (90, 91)).any()
    assert len(np.unique(drawn)) == 95
    assert {round(value, 5) for request in requests for value in request.log_probs} == {round(-np.log(97), 5)}


def test_prompts_whose_images_do_not_fit_are_refused(image_models: dict[str, Path]) -> None:
    engine = decode_engine(image_models["qwen3_vl"])
    one = row(text(1, 3), Picture(seed=1), text(2, 2))
    with pytest.raises(ValueError, match="prompt has tokens of images or videos, but no images"):
        engine.request(one.tokens, Sampling(max_tokens=1))
    with pytest.raises(RowError, match="prompt: has 3 image tokens, but its images need 4"):
        PromptImages.of(engine.model, one.tokens[:6], one.pixel_values, one.grid_thw)
    beside = row(text(1, 3), Picture(seed=1), Picture(seed=2))
    with pytest.raises(RowError, match="2 images in 1 places"):
        PromptImages.of(engine.model, beside.tokens, beside.pixel_values, beside.grid_thw)
