"""`model.use_liger` in verl's engines, Liger's kernels in Triton's interpreter: actor and critic on trees run them and
equal rows alone through stock layers."""

from pathlib import Path
from typing import Any

import pytest
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import alone, assert_trains_as
from hostile_rows import row, tokens
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from toy_qwen import under

from tree_rl.verl_plugin.options import TreeConfig

TRUNK = tokens(1, 4)
BRANCHES = [row(TRUNK + tokens(2, 2)), row(TRUNK + tokens(3, 1), advantage=-1.0)]
ROWS = [*BRANCHES, row(TRUNK[:3]), row(tokens(4, 3))]
AUTO = {"use_liger": "auto"}


def tiny(**more: Any) -> Any:
    return tiny_qwen3(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **more)


def fused_layers(engine: Any) -> int:
    return sum("Liger" in module._get_name() for module in engine.module.modules())


def test_actor_on_trees_equals_rows_alone(tmp_path: Path, liger: None) -> None:
    path = save_model(tmp_path, tiny())
    expected = alone(build_engine(path, tree=None), ROWS)
    fused = {"use_liger": True, "enable_gradient_checkpointing": True}
    engine = build_engine(path, tree=TreeConfig(mode="tree", max_tokens=4), model=fused)
    # Four norms in the layer, the last one, and the MLP.
    assert fused_layers(engine) == 6
    got = assert_trains_as(expected, engine, ROWS)
    assert got["metrics"]["tree/partitions"].aggregate() > 1
    # The engine's own rows, and another engine of the process, which has no such layers.
    assert fused_layers(build_engine(path, tree=None)) == 0


def test_an_impossible_default_is_off_and_said(tmp_path: Path, liger: None, caplog: pytest.LogCaptureFixture) -> None:
    engine = build_engine(save_model(tmp_path, tiny(hidden_act="gelu")), tree=TreeConfig(mode="tree"), model=AUTO)
    assert fused_layers(engine) == 0
    (notice,) = (record.message for record in caplog.records if "use_liger" in record.message)
    assert notice.startswith("model.use_liger=auto: the model keeps its own layers, as ")


def test_the_default_fuses_where_it_can(tmp_path: Path, liger: None) -> None:
    path = save_model(tmp_path, tiny(tie_word_embeddings=False), value=True)
    build = {"tree": TreeConfig(mode="tree"), "value": True, "model": AUTO}
    assert fused_layers(build_engine(path, **build)) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        assert fused_layers(build_engine(path, **build)) == 0


def test_machine_files_ask_for_what_a_model_can_have() -> None:
    with initialize_config_module("tree_rl.verl_plugin.config", version_base=None):
        sft = compose("tree_sft_trainer")
        told = compose("tree_sft_trainer", overrides=["model.use_liger=true"])
        path = "hydra.searchpath=[pkg://verl.trainer.config]"
        rl = compose("machine/gpu", overrides=[path])
    assert (sft.model.use_liger, told.model.use_liger) == ("auto", True)
    assert rl.actor_rollout_ref.model.use_liger == rl.critic.model.use_liger == "auto"


@pytest.mark.parametrize(("activation", "has_liger"), [("silu", True), ("gelu", False)])
def test_servers_of_vllm_read_the_default(tmp_path: Path, activation: str, has_liger: bool, liger: None) -> None:
    """They convert the model's node to verl's class, which takes no word for a boolean."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig, RolloutConfig

    from tree_rl.verl_plugin.launch.train import complete

    path = save_model(tmp_path, tiny(hidden_act=activation))
    given = ["hydra.searchpath=[pkg://tree_rl.verl_plugin.config]", "+machine=gpu", "trainer.v1.trainer_mode=tree_sync"]
    given += under("actor_rollout_ref", f"model.path={path}", "rollout.name=vllm", "actor.use_dynamic_bsz=true")
    given += [f"{role}.strategy=fsdp2" for role in ("actor_rollout_ref.actor", "critic")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=given)
    complete(config, [])
    model = OmegaConf.merge(dict(config.actor_rollout_ref.model), {"load_tokenizer": False})
    assert omega_conf_to_dataclass(model, dataclass_type=HFModelConfig).use_liger is has_liger
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)
