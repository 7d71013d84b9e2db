"""Sessions with a window of screenshots: one row per window with the images it saw, and the log-probs that the
trainer's engine computes from verl's inputs of the row. Its trees merge rows only where their images are the same."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_server import Client, build_server, describe
from engine_harness import Row, build_engine, nested, ppo_batch
from equivalence import infer
from image_rows import IMAGE_TOKEN, Picture, PictureRow, text
from image_rows import row as picture_row
from local_trainer import LocalQueue
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig

from tree_rl.rollout.gateway.tokens.images import FIRST_NUMBER
from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.agent_loops.gateway_agent_loop import TreeGatewayAgentLoop
from tree_rl.verl_plugin.agent_loops.image_spans import IMAGE_SPANS, spans_of_images, with_image_keys
from tree_rl.verl_plugin.agent_loops.prompt_forests import TreeAgentLoopWorker
from tree_rl.verl_plugin.agent_loops.session_images import SessionImages
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.trainer.queue_rows import fetch_row_tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from gui_window.agent import CLICKS
from gui_window.model import save
from gui_window.screens import Screens

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HFModelConfig:
    path = tmp_path_factory.mktemp("gui") / "model"
    save(path, shown=0, seed=0)
    return describe(path, trust_remote_code=True)


async def play(model: HFModelConfig, *seeds: int) -> list[list[AgentLoopOutput]]:
    custom = {"gateway_agent": {"agent": "gui_window.agent.WindowAgent"}}
    settings = {"name": "hf", "prompt_length": 64, "response_length": 64, "custom": custom}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": settings}, "data": {}})
    client = Client(build_server(model, prompt_length=64, response_length=64))
    given = {"trainer_config": DictConfigWrap(config=config), "data_config": DictConfigWrap(config.data)}
    given |= {"tokenizer": model.tokenizer, "processor": model.processor, "hf_model_type": "qwen2_5_vl"}
    loop = TreeGatewayAgentLoop(server_manager=client, dataset_cls=None, **given)
    samples = [{"raw_prompt": [], "extra_info": {"seed": seed}} for seed in seeds]
    return await asyncio.gather(*[loop.run(dict(SAMPLING), **sample) for sample in samples])


def stored(model: HFModelConfig, output: AgentLoopOutput) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Tokens, positions and inputs of a row, as verl's worker stores them."""
    worker = object.__new__(TreeAgentLoopWorker)
    worker.processor, worker.tokenizer, worker.mm_processor_kwargs = model.processor, model.tokenizer, {}
    ids = torch.tensor(output.prompt_ids + output.response_ids)
    inputs = worker._compute_multi_modal_inputs(output, ids)
    positions = worker._compute_position_ids(ids[None], torch.ones_like(ids)[None], inputs)
    return ids, positions[0], inputs


async def test_rows_of_a_window_have_the_trainers_log_probs_and_share_screens(model: HFModelConfig) -> None:
    sessions = await play(model, 1, 1, 2)
    rows = [row for session in sessions for row in session]
    for session in sessions:
        # The first row continues until the first screenshot is dropped; then every click starts a row.
        assert len(session) >= CLICKS - 1
        assert all(len(row.multi_modal_data["images"]) in (1, 2) for row in session)
        assert sum(sum(row.response_mask) for row in session) >= session[0].extra_fields["generated_tokens"]
    inputs = [stored(model, row) for row in rows]
    given = [{"prompt": len(row.prompt_ids), "mask": list(row.response_mask)} for row in rows]
    texts = enumerate(zip(inputs, given, strict=True))
    data = ppo_batch([Row(tokens=ids.tolist(), uid=str(number), **more) for number, ((ids, *_), more) in texts])
    data["position_ids"] = nested([positions for _, positions, _ in inputs])
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [given for _, _, given in inputs])
    found = infer(build_engine(Path(model.path), tree=TreeConfig(mode="tree")), data)["log_probs"].unbind()
    compared = 0
    for row, log_probs in zip(rows, found, strict=True):
        first = len(row.prompt_ids)
        for place, (mask, recorded) in enumerate(zip(row.response_mask, row.response_logprobs, strict=True)):
            assert not mask or abs(float(log_probs[first + place - 1]) - recorded) < 2e-5
            compared += mask
    assert compared >= 3 * CLICKS
    # The trainer's trees share the screens that sessions have in common. What follows the first prompt is sampled.
    assert all(len(row.extra_fields[IMAGE_SPANS]) == len(row.multi_modal_data["images"]) for row in rows)
    first_rows = [(session[0], torch.tensor(session[0].prompt_ids + session[0].response_ids)) for session in sessions]
    keyed = [with_image_keys(ids.numpy(), row.extra_fields[IMAGE_SPANS]) for row, ids in first_rows]
    prompts = [ids[: len(row.prompt_ids)] for ids, (row, _) in zip(keyed, first_rows, strict=True)]
    assert len(prompts[0]) == len(prompts[1]) == len(prompts[2])
    assert Forest.from_rows(prompts[:2]).num_unique == len(prompts[0]) < Forest.from_rows(prompts[1:]).num_unique


def test_images_are_numbered_by_content(model: HFModelConfig) -> None:
    images = SessionImages(model.processor)
    screens = {seed: Screens(seed, 1).screenshot() for seed in range(20)}
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    seen = {seed: images.encode(f"a{place}b", [one]) for seed, one in screens.items()}
    assert len({tuple(ids) for ids in seen.values()}) == len({one.tobytes() for one in screens.values()}) == 4
    assert Counter(token >= FIRST_NUMBER for token in seen[0])[True] == 4
    ids, found = images.split([*seen[0], *seen[1]])
    assert [one.tobytes() for one in found] == [screens[seed].tobytes() for seed in (0, 1)]
    assert ids.count(model.processor.image_token_id) == 8 and max(ids) < len(model.tokenizer)
    assert images.split(images.encode("text", [])) == (images.encode("text", []), [])
    with pytest.raises(ValueError, match=r"has 0 image tokens, but its 1 images need 4"):
        images.encode("no place", [screens[0]])


def spans(one: PictureRow, **changes: Any) -> list[tuple[int, int, int]]:
    inputs = {"pixel_values": one.pixel_values, "image_grid_thw": one.grid_thw, **changes}
    return spans_of_images(one.tokens, inputs, image_token=IMAGE_TOKEN, merge_size=2)


def test_spans_name_the_content_of_images() -> None:
    first, wide, tall = Picture(seed=1), Picture(seed=4, width=8), Picture(seed=4, height=8)
    one = picture_row(text(1, 3), first, text(2, 2), wide, first)
    (a, b, c) = spans(one)
    assert [(span[0], span[1]) for span in (a, b, c)] == [(3, 7), (9, 17), (17, 21)]
    assert a[2] == c[2] != b[2]
    assert spans(picture_row(text(1, 3), wide))[0][2] != spans(picture_row(text(1, 3), tall))[0][2]
    assert spans(picture_row(text(1, 3))) == []
    assert spans(one, pixel_values=None) == []
    assert spans(picture_row(text(1, 3), [IMAGE_TOKEN], first)) == []


def test_the_trainer_reads_rows_with_the_keys_of_their_images(queue: LocalQueue) -> None:
    rows = [picture_row(text(1, 3), Picture(seed=seed), text(2, 2)) for seed in (1, 2, 1)]
    keys = [f"u_{number}_0" for number in range(3)]
    fields = TensorDict({"input_ids": nested([torch.tensor(one.tokens) for one in rows])}, batch_size=3)
    tags: list[dict[str, Any]] = [{IMAGE_SPANS: spans(one)} for one in rows]
    found = fetch_row_tokens(queue.kv_batch_put(keys, "train", fields, tags))
    assert Forest.from_rows([found[key] for key in keys]).num_unique == 9 + 6
    of_text = fetch_row_tokens(queue.kv_batch_put(keys, "train", fields, [{IMAGE_SPANS: ()}] * 3))
    assert Forest.from_rows([of_text[key] for key in keys]).num_unique == 9
    assert np.array_equal(with_image_keys(of_text[keys[0]], ()), rows[0].tokens)
