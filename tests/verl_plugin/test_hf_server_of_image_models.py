"""The embedded rollout engine generates text with checkpoints that also read images, under the trainer's names."""

import asyncio
from pathlib import Path

import pytest
import torch
from engine_harness import build_engine
from tokenizers import Tokenizer, models
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from verl.workers.config import HFModelConfig, RolloutConfig
from wrapped_models import VOCAB, wrapped_config, wrapped_model

from tree_rl.verl_plugin.embedded_rollout.server import HFServer
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import load, pack
from tree_rl.verl_plugin.options import TreeConfig

FAMILIES = ("gemma3", "qwen3_vl")


def save(path: Path, family: str, *, tied: bool) -> Path:
    wrapped_model(wrapped_config(family, tied=tied)).save_pretrained(path)
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t2", pad_token="t0").save_pretrained(path)
    return path


def build_server(path: Path, *, weights_follow: bool) -> HFServer:
    config = RolloutConfig(
        name="hf", tensor_model_parallel_size=1, prompt_length=20, response_length=12, dtype="float32"
    )
    model = HFModelConfig(path=str(path), override_config={"attn_implementation": "sdpa"})
    return HFServer(config, model, replica_rank=0, num_threads=1, weights_follow=weights_follow)


@pytest.mark.parametrize("family, tied", [(family, at % 2 == 0) for at, family in enumerate(FAMILIES)])
def test_log_probs_are_those_of_the_whole_model_with_the_weights_of_the_trainer(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = save(tmp_path, family, tied=tied)
    server = build_server(path, weights_follow=True)
    trainer = build_engine(path, tree=TreeConfig(mode="tree"))
    for bucket in pack(trainer.get_per_tensor_param()[0], 1 << 20):
        load(server.engine.model, bucket)
    prompt = [5, 9, 7, 11]
    params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12, "logprobs": True}
    output = asyncio.run(server.generate(prompt, params, request_id="a"))

    published = AutoModelForImageTextToText.from_pretrained(path)
    ids = torch.tensor([prompt + output.token_ids])
    with torch.no_grad():
        logits = published(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=2e-5, atol=2e-5)
