"""Rows with images through vLLM: screenshots in a window, two steps of GRPO, and vLLM draws from the trainer's policy.

vLLM imports two parts of transformers that need torchvision, whose CPU build PyPI does not have: `smart_resize`, which
transformers also has in a module without torchvision, and the processor of videos, which these jobs do not have.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_jobs import AGREEMENT, LARGE_STEPS, STALE, figures, run
from vllm_harness import GPU, HERE

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]

RECIPES = Path(__file__).parents[2] / "recipes"
SMART_RESIZE = """
import sys
from importlib.util import spec_from_file_location


class WithoutTorchvision:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "transformers.models.qwen2_vl.image_processing_qwen2_vl":
            return spec_from_file_location(name, f"{path[0]}/image_processing_pil_qwen2_vl.py")


sys.meta_path.insert(0, WithoutTorchvision)
"""
NO_VIDEOS = """
from transformers import BaseVideoProcessor


class Plain(type(BaseVideoProcessor)):
    __getattribute__ = type.__getattribute__


class NoVideos(dict, BaseVideoProcessor, metaclass=Plain):
    _auto_class = None
    # vLLM's Qwen3-VL plans its memory by these.
    size = {"shortest_edge": 64, "longest_edge": 4096}
    merge_size = 2
    patch_size = 4
    temporal_patch_size = 2

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    @classmethod
    def register_for_auto_class(cls):
        pass
"""
VISION = {
    "qwen2_5_vl": {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"depth": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}
TASKS = 2
"""Tasks of a step; their texts are equal, and their screens are not."""
PIXELS = {"min_pixels": 1024, "max_pixels": 4096}
"""Screens of 256 pixels become images of 16 tokens."""


def save_model(folder: Path, family: str) -> None:
    """The recipe's model with heads that vLLM's attention accepts, logits far from uniform, and no padding.

    vLLM may not draw tokens of images and videos, which the trainer's softmax includes. So their logits are low: one
    channel is the same at every token, and only these two rows of the head read it.
    """
    from gui_window.model import build_model, build_processor
    from gui_window.processor import Qwen2_5_VLProcessor
    from transformers import AutoConfig, AutoModelForImageTextToText

    processor = build_processor()
    recipe = build_model(processor, seed=0).config
    rope = {"mrope_section": [8, 4, 4], **({"mrope_interleaved": True} if family == "qwen3_vl" else {})}
    own = {"vocab_size": len(processor.tokenizer), "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    own |= {"rope_parameters": recipe.text_config.rope_parameters | rope, "initializer_range": 0.2}
    # vLLM 0.29 on a CPU asks Qwen3-VL's decoder alone for it, and published configs have none there.
    own |= {"architectures": ["Qwen3ForCausalLM"]}
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    ends = ("eos_token_id", "pad_token_id", "bos_token_id")
    seen = ("hidden_size", "intermediate_size", "num_heads", "patch_size", "out_hidden_size")
    places = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = AutoConfig.for_model(
        family,
        text_config=taken(recipe.text_config, *sizes, *ends) | own,
        vision_config=taken(recipe.vision_config, *seen) | {"initializer_range": 0.2} | VISION[family],
        tie_word_embeddings=True,
        dtype="float32",
        **taken(recipe, *places),
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 3
        embedding[[config.image_token_id, config.video_token_id], 0] = -1000
    Qwen2_5_VLProcessor.register_for_auto_class()
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    # As published models of this family have it; vLLM reads the other form without `trust_remote_code`.
    read = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    flat = read.pop("image_processor") | read
    if family == "qwen3_vl":
        del flat["auto_map"]
        flat["processor_class"] = "Qwen3VLProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(flat))
    if find_spec("torchvision") is None:
        (folder / "no_videos.py").write_text(NO_VIDEOS)
        videos = {"auto_map": {"AutoVideoProcessor": "no_videos.NoVideos"}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def taken(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def first_clicks(model: Path) -> torch.Tensor:
    """Probabilities of the first token that the model says to each of the four screens."""
    from gui_window.model import build_processor
    from gui_window.screens import Screens, conversation
    from transformers import AutoModelForImageTextToText

    processor = build_processor()
    screens = {(one := Screens(seed, 1)).target: one.screenshot() for seed in range(20)}
    text = processor.apply_chat_template(conversation([None]), tokenize=False, add_generation_prompt=True)
    inputs: Any = processor(text=[text] * 4, images=list(screens.values()), return_tensors="pt", **PIXELS)
    policy = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.softmax(policy(**inputs).logits[:, -1], dim=-1)


@pytest.mark.parametrize("family", VISION)
def test_vllm_draws_from_the_policy_that_read_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    import pandas as pd

    monkeypatch.syspath_prepend(str(RECIPES))
    from gui_window.screens import ASKED

    save_model(tmp_path / "model", family)
    if find_spec("torchvision") is None:
        (tmp_path / "sitecustomize.py").write_text(SMART_RESIZE)
    (tmp_path / "gui_window").symlink_to(RECIPES / "gui_window")
    prompt = [{"role": "user", "content": ASKED}]
    tasks = [{"data_source": "gui", "prompt": prompt, "extra_info": {"index": seed, "seed": seed}} for seed in range(4)]
    data = tmp_path / "tasks.parquet"
    pd.DataFrame([task | {"reward_model": {"ground_truth": ""}} for task in tasks]).to_parquet(data)
    changes = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={TASKS}",
        "data.max_prompt_length=128",
        *(f"+data.mm_processor_kwargs.{name}={number}" for name, number in PIXELS.items()),
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={TASKS}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.rollout.n=3",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm={limit_mm_per_prompt:{image:2,video:0},block_size:32}",
        f"+actor_rollout_ref.rollout.custom.tree_dump_dir={tmp_path / 'trees'}",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "trainer.total_training_steps=2",
        *(["machine=gpu"] if GPU else []),
    ]
    recipe = ["--config-path", str(RECIPES / "gui_window"), "--config-name", "gui_window"]
    command = [sys.executable, "-m", "tree_rl.train", *recipe, *changes, *HERE, *LARGE_STEPS]
    log = run(command, tmp_path)

    differences = figures(log, "training/rollout_probs_diff_max")
    print("\nlargest difference of probabilities, rollout against trainer, by step:", differences)
    assert len(differences) == 2 and max(differences) < AGREEMENT
    assert max(figures(log, "tree/self_check_error")) < 1e-4
    assert min(figures(log, "tree/prefix_hit_rate")) > 0.1, "the agreement covers what vLLM had cached"
    assert min(figures(log, "tree/session/branches")) > 2, "every shift of the window starts a branch"
    assert min(figures(log, "tree/por")) > 0.3, "branches and sessions of a task share screens"
    assert min(figures(log, "actor/grad_norm")) > 0
    dumped = "".join(path.read_text() for path in (tmp_path / "trees").glob("train-*.jsonl"))
    rows = [json.loads(line) for line in dumped.splitlines()]
    trained = {(row["step"], row["uid"], row["session"]) for row in rows if any(row["response_mask"])}
    assert len(trained) == 2 * TASKS * 3

    before = first_clicks(tmp_path / "model")
    after = first_clicks(next((tmp_path / "out").glob("global_step_1/**/huggingface")))
    print("largest difference, first step's policy against the second's:", float((before - after).abs().max()))
    assert (before - after).abs().max() > STALE, "stale weights would show"
    assert torch.pdist(before).min() > STALE and torch.pdist(after).min() > STALE, "another screen would show"
