"""The embedded rollout engine reads images: its log-probs are those of the trainer's engine, and its cache tells images
apart."""

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
from wrapped_models import wrapped_config, wrapped_model

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


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        wrapped_model(wrapped_config(family, initializer_range=0.2)).save_pretrained(root / family)
    return {path.name: path for path in root.iterdir()}


def decode_engine(path: Path) -> DecodeEngine:
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=ATTENTION)
    use_language_model(model)
    return DecodeEngine(model, capacity_tokens=64)


def ask(engine: DecodeEngine, one: PictureRow, seed: int = 0) -> Request:
    images = PromptImages.of(engine.model, one.tokens, one.pixel_values, one.grid_thw) if one.pictures else None
    return engine.request(one.tokens, Sampling(max_tokens=6, seed=seed), images)


def finish(engine: DecodeEngine) -> None:
    while not engine.is_idle:
        engine.step()


def answered(engine: DecodeEngine, one: PictureRow) -> Request:
    request = ask(engine, one)
    finish(engine)
    return request


def log_probs_of_trainer(path: Path, rows: list[PictureRow]) -> list[torch.Tensor]:
    data = picture_batch(AutoModelForImageTextToText.from_pretrained(path), rows)
    return list(infer(build_engine(path, tree=TreeConfig(mode="tree")), data)["log_probs"].unbind())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_trainers_engine(paths: dict[str, Path], family: str) -> None:
    engine = decode_engine(paths[family])
    together = [ask(engine, one, seed) for seed, one in enumerate(PROMPTS)]
    finish(engine)
    # Again, so that prompts continue what the cache holds, also from within an image.
    again = [ask(engine, one, 100 + seed) for seed, one in enumerate(PROMPTS)]
    finish(engine)
    longer = []
    for one, request in zip(PROMPTS, together, strict=True):
        next_turn = replace(one, pieces=(*one.pieces, request.token_ids, [92], Picture(seed=9), [93, 5]))
        longer.append((next_turn, answered(engine, next_turn)))
    assert sum(request.cached_tokens for request in again) > sum(request.cached_tokens for request in together)
    cases = [*zip(PROMPTS, together, strict=True), *zip(PROMPTS, again, strict=True), *longer]
    rows = [replace(one, pieces=(*one.pieces, request.token_ids)) for one, request in cases]
    for (one, request), found in zip(cases, log_probs_of_trainer(paths[family], rows), strict=True):
        first = len(one.tokens)
        assert IMAGE_TOKEN not in request.token_ids
        expected = found[first - 1 : first - 1 + len(request.token_ids)]
        torch.testing.assert_close(torch.tensor(request.log_probs), expected, rtol=2e-5, atol=2e-5)


def test_prompts_with_equal_ids_share_only_tokens_before_another_image(paths: dict[str, Path]) -> None:
    engine = decode_engine(paths["qwen3_vl"])
    trunk, end = text(1, 5), text(2, 4)
    rows = [row(trunk, Picture(seed=seed), end) for seed in (1, 2, 1)]
    assert rows[0].tokens == rows[1].tokens
    cached = [answered(engine, one).cached_tokens for one in rows]
    assert cached == [0, len(trunk), len(rows[0].tokens) - 1]
    assert answered(engine, row(trunk, Picture(seed=1, width=8, height=2), end)).cached_tokens == len(trunk)


def test_features_are_computed_once_per_image_until_the_weights_change(paths: dict[str, Path]) -> None:
    engine, seen = decode_engine(paths["qwen3_vl"]), []
    engine.model.base_model.visual.register_forward_pre_hook(lambda *_: seen.append(1))
    one = row(text(1, 5), Picture(seed=1), text(2, 4), Picture(seed=2), text(3, 2), Picture(seed=1), text(4, 2))
    for number in range(3):
        answered(engine, replace(one, pieces=(text(20 + number, 3), *one.pieces)))
    assert len(seen) == 2
    engine.forget_prefixes()
    answered(engine, one)
    assert len(seen) == 4


def test_tokens_of_images_are_never_drawn_and_log_probs_count_them(paths: dict[str, Path]) -> None:
    engine = decode_engine(paths["qwen3_vl"])
    with torch.no_grad():
        engine.model.get_output_embeddings().weight.zero_()
    requests = [ask(engine, row(text(seed, 5)), seed) for seed in range(200)]
    finish(engine)
    drawn = np.concatenate([request.token_ids for request in requests])
    assert not np.isin(drawn, (90, 91)).any()
    assert len(np.unique(drawn)) == 95
    assert {round(value, 5) for request in requests for value in request.log_probs} == {round(-np.log(97), 5)}


def test_prompts_whose_images_do_not_fit_are_refused(paths: dict[str, Path]) -> None:
    engine = decode_engine(paths["qwen3_vl"])
    one = row(text(1, 3), Picture(seed=1), text(2, 2))
    with pytest.raises(ValueError, match="prompt has tokens of images or videos, but no images"):
        engine.request(one.tokens, Sampling(max_tokens=1))
    with pytest.raises(RowError, match="prompt: has 3 image tokens, but its images need 4"):
        PromptImages.of(engine.model, one.tokens[:6], one.pixel_values, one.grid_thw)
    beside = row(text(1, 3), Picture(seed=1), Picture(seed=2))
    with pytest.raises(RowError, match="2 images in 1 places"):
        PromptImages.of(engine.model, beside.tokens, beside.pixel_values, beside.grid_thw)
