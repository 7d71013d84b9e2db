"""A wrong command line of verl's main_ppo: one line that names the key and the remedy, exit code 2, before Ray."""

import copy
import shlex
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest
import verl.trainer.main_ppo as main_ppo
from omegaconf import DictConfig

from tree_rl.verl_plugin.launch import early_check
from tree_rl.verl_plugin.launch.compose import CommandLine, CommandLineError, compose, read_command_line
from tree_rl.verl_plugin.launch.early_check import check_main_ppo, checked
from tree_rl.verl_plugin.launch.tree_arguments import accept_model_type

ACTOR, ENGINE = "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TREE = "trainer.v1.trainer_mode=tree_sync"
AS_STOCK = f"trainer.v1.trainer_mode=sync +{MODEL}.model_type=tree_language_model"
"""verl's own trainer with a tree engine."""
HEATS = (
    ("0", "0"),
    ("0.0", "0.0"),
    ("-0.7", "-0.7"),
    ("nan", "nan"),
    ("inf", "inf"),
    ("null", "None"),
    ("true", "True"),
)
WRONG: list[tuple[str, tuple[str, ...]]] = [
    # What trees do not run on.
    (f"{ACTOR}.strategy=fsdp", (f"{ACTOR}.strategy=fsdp:", f"set {ACTOR}.strategy=fsdp2")),
    (f"{ACTOR}.strategy=fsdp1", (f"{ACTOR}.strategy=fsdp1:", "fsdp2")),
    (f"{ACTOR}.strategy=megatron", (f"{ACTOR}.strategy=megatron:", "fsdp2")),
    (f"actor_rollout_ref.ref.strategy=fsdp {ACTOR}.use_kl_loss=true", ("ref.strategy=fsdp:", "set fsdp2")),
    ("critic.strategy=fsdp algorithm.adv_estimator=gae", ("critic.strategy=fsdp:", "set fsdp2")),
    ("model_engine=megatron", (f"{ACTOR}.strategy=megatron:", "fsdp2")),
    (f"{MODEL}.use_fused_kernels=true", (f"{MODEL}.use_fused_kernels=True:", "set it to False")),
    ("algorithm.adv_estimator=remax", ("algorithm.adv_estimator=remax:", "rloo")),
    ("trainer.use_v1=false", ("trainer.use_v1=False:", "set it to true")),
    (f"{ENGINE}.ulysses_sequence_parallel_size=3", (f"{ENGINE}.ulysses_sequence_parallel_size=3 on 1 ranks",)),
    # Mistyped choices.
    (f"{MODEL}.model_type=tree_languagemodel", (f"{MODEL}.model_type=", "did you mean tree_language_model?")),
    ("critic.model.model_type=tree_valuemodel", ("critic.model.model_type=", "did you mean tree_value_model?")),
    ("trainer.v1.trainer_mode=tree_synk", ("trainer.v1.trainer_mode=tree_synk:", "did you mean tree_sync?")),
    ("algorithm.adv_estimator=grp0", ("algorithm.adv_estimator=grp0:", "did you mean grpo?")),
    (f"{ROLLOUT}.name=vlm", (f"{ROLLOUT}.name=vlm:", "did you mean vllm?")),
    (f"{ACTOR}.policy_loss.loss_mode=vanila", (f"{ACTOR}.policy_loss.loss_mode=", "did you mean vanilla?")),
    (f"{ACTOR}.loss_agg_mode=token_mean", (f"{ACTOR}.loss_agg_mode=token_mean:", "did you mean token-mean?")),
    ("machine=cpuu", ("machine=cpuu:", "did you mean cpu?")),
    ("model_engine=megatrn", ("model_engine/megatrn", "megatron")),
    ("trainer.logger=[consle]", ("trainer.logger=consle:", "did you mean console?")),
    # Mistyped keys.
    (f"{ACTOR}.strateg=fsdp2", (f"{ACTOR}.strateg=fsdp2:", f"did you mean {ACTOR}.strategy?")),
    (f"+{ACTOR}.strateg=fsdp2", (f"{ACTOR}.strateg:", f"did you mean {ACTOR}.strategy?")),
    ("actor_rolout_ref.actor.strategy=fsdp2", ("actor_rolout_ref", f"did you mean {ACTOR}.strategy?")),
    ("data.train_batchsize=4", ("data.train_batchsize=4:", "did you mean data.train_batch_size?")),
    ("data.train_batch_size", ("data.train_batch_size: no KEY=VALUE",)),
    ("tree=4096", ("tree=4096:", "tree.max_tokens=4096")),
    # Options of trees, under the key that the user wrote.
    ("tree.max_token=5", ("tree.max_token:", "did you mean tree.max_tokens?")),
    ("tree.max_tokens=-3", ("tree.max_tokens=-3:", "positive number")),
    ("tree.max_tokens=abc", ("tree.max_tokens='abc':", "auto or null")),
    ("tree.mode=trees", ("tree.mode='trees':", "auto, tree, flat")),
    ("tree.attention=fa5", ("tree.attention='fa5':", "fa4")),
    ("tree.self_check=maybe", ("tree.self_check='maybe':", "true or false")),
    (f"{ENGINE}.tree.mod=tree", (f"{ENGINE}.tree.mod:", "no such option")),
    ("critic.fsdp.tree.scope=uids", ("critic.fsdp.tree.scope='uids':", "uid, rank")),
    # What would train on NaN, or on other rows' advantages.
    *((f"{ROLLOUT}.temperature={value}", (f"{ROLLOUT}.temperature={said}:", "above 0")) for value, said in HEATS),
    (f"{ROLLOUT}.temperature=warm", (f"{ROLLOUT}.temperature=warm:", "expected a number")),
    (f"{ROLLOUT}.val_kwargs.temperature=-1", (f"{ROLLOUT}.val_kwargs.temperature=-1:", "0 (greedy)")),
    (f"{ROLLOUT}.val_kwargs.temperature=nan", (f"{ROLLOUT}.val_kwargs.temperature=nan:", "0 (greedy)")),
    (f"{ROLLOUT}.temperature=0 {AS_STOCK}", (f"{ROLLOUT}.temperature=0:", "above 0")),
    ("algorithm.use_pf_ppo=true", ("algorithm.use_pf_ppo=True:", "set it to False")),
    (f"algorithm.use_pf_ppo=true algorithm.adv_estimator=gae {AS_STOCK}", ("algorithm.use_pf_ppo=True:", "False")),
    # Values and files.
    (f"{ROLLOUT}.n=0", (f"{ROLLOUT}.n=0:", "at least 1")),
    (f"{ACTOR}.optim.lr=abc", (f"{ACTOR}.optim.lr=abc:", "expected a number")),
    (f"{ACTOR}.use_dynamic_bsz=maybe", (f"{ACTOR}.use_dynamic_bsz=maybe:", "true or false")),
    ("trainer.total_training_steps=-1", ("trainer.total_training_steps=-1:", "null")),
    (f"{MODEL}.path=/nowhere", (f"{MODEL}.path=/nowhere:", "no such folder")),
    ("data.train_files=/nowhere.parquet", ("data.train_files=/nowhere.parquet:", "no such file")),
    # What would end the run after the rollouts, or every session of it.
    (
        "distillation.enabled=true distillation.distillation_loss.loss_mode=forward_kl_topk",
        ("distillation.distillation_loss.loss_mode=forward_kl_topk:", "loss_mode=k3"),
    ),
    (f"{ROLLOUT}.enable_rollout_routing_replay=true", (f"{ROLLOUT}.enable_rollout_routing_replay=True", "=R3")),
    (f"{ROLLOUT}.multi_turn.tool_config_path=/no.yaml", ("multi_turn.tool_config_path=/no.yaml:", "no such file")),
    (f"{ROLLOUT}.multi_turn.function_tool_path=no.py", ("multi_turn.function_tool_path=no.py:", "no such file")),
    (f"{ROLLOUT}.agent.agent_loop_config_path=no.yaml", ("agent_loop_config_path=no.yaml:", "no such file")),
    ("data.tool_config_path=/no.yaml", ("data.tool_config_path=/no.yaml:", "no such file")),
    (f"{MODEL}.lora_adapter_path=/no {MODEL}.lora_rank=4", (f"{MODEL}.lora_adapter_path=/no:", "no such file")),
    ("tree.reuse_log_probs=true algorithm.use_kl_in_reward=true", ("reuse_log_probs=True, but", "set it to auto")),
    (f"{ENGINE}.fsdp_size=2 trainer.n_gpus_per_node=3", (f"{ENGINE}.fsdp_size=2 on 3 ranks:", "divisor")),
    (f"+{ROLLOUT}.custom.tree_agent.max_turn=3", ("custom.tree_agent.max_turn: no such option", "max_turns")),
    (
        f"+{ROLLOUT}.custom.gateway_agent.agent=a.B +{ROLLOUT}.custom.gateway_agent.session_timeout_s=-1",
        ("custom.gateway_agent.session_timeout_s=-1:", "more than 0"),
    ),
    (
        f"+{ROLLOUT}.custom.gateway_agent.agent=no_module.Agent",
        ("custom.gateway_agent.agent=no_module.Agent: No module named", "PYTHONPATH"),
    ),
    (
        f"+{ROLLOUT}.custom.gateway_agent.agent=tree_rl.rollout.agents.in_environment.Agent",
        ("in_environment.Agent: module", "has no attribute"),
    ),
    (
        f"{ROLLOUT}.agent.default_agent_loop=tree_gateway_agnt",
        ("default_agent_loop=tree_gateway_agnt: no such agent loop", "did you mean tree_gateway_agent?"),
    ),
    (f"{ROLLOUT}.agent.default_agent_loop=tool_agnt", ("default_agent_loop=tool_agnt:", "did you mean tool_agent?")),
    (f"tree.reuse_log_probs=true {AS_STOCK}", ("tree.reuse_log_probs=True:", "trainer_mode=tree_sync")),
    # Keys in another section: the hint names one that exists.
    ("critic.model.fsdp_config.param_offload=true", ("did you mean critic.fsdp.param_offload?",)),
    (
        "actor_rollout_ref.model.fsdp_config.param_offload=true",
        ("did you mean actor_rollout_ref.", "fsdp_config.param_offload?"),
    ),
    ("critic.fsdp_confg.param_offload=true", ("did you mean critic.fsdp.param_offload?",)),
    ("data.train_files=[a", ("data.train_files=[a:", "quote it")),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A stock config's command line that a machine without an accelerator runs."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "rows.parquet").touch()
    (folder / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    files = [f"data.{name}_files={folder}/rows.parquet" for name in ("train", "val")]
    models = [f"{role}.path={folder}" for role in (MODEL, "critic.model")]
    return [TREE, "machine=cpu", "algorithm.adv_estimator=grpo", *files, *models]


@pytest.fixture(autouse=True)
def _stock_config_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(early_check, "compose", lambda line, overrides: copy.deepcopy(_composed(line, *overrides)))


@lru_cache(maxsize=8)
def _composed(line: CommandLine, *overrides: str) -> DictConfig:
    return compose(line, overrides)


def command_line(*arguments: str) -> CommandLine:
    written = [main_ppo.__file__, *arguments]
    accept_model_type(written)
    line = read_command_line(written, config_path="config", config_name="ppo_trainer")
    assert line is not None
    return line


@pytest.mark.parametrize(("argument", "said"), WRONG, ids=[argument for argument, _ in WRONG])
def test_one_line_names_the_key_and_the_remedy(argument: str, said: tuple[str, ...], good: list[str]) -> None:
    with pytest.raises(CommandLineError) as refused:
        checked(command_line(*good, *argument.split()))
    message = str(refused.value)
    assert "\n" not in message and len(message) < 400
    for words in said:
        assert words in message


def test_a_stock_config_runs_on_fsdp2_and_says_so(good: list[str]) -> None:
    overrides, banner = checked(command_line(*good, "tree.max_tokens=4096"))
    config = compose(command_line(*good), overrides)
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "fsdp2"
    for engine in (config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config):
        assert (engine.tree.max_tokens, engine._target_) == (4096, early_check.ENGINE_CONFIG)
    assert config.actor_rollout_ref.rollout.name == "hf" and config.trainer.device == "cpu"
    for fact in ("fsdp2 in place of verl's default fsdp", "tree_language_model", "tree_sync", "max_tokens 4096"):
        assert fact in banner
    assert "\n" not in banner


def test_the_banner_names_the_budget_that_decides(good: list[str]) -> None:
    rows = [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"]
    rows.append(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=3")
    dynamic = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1234"]
    assert "max_tokens of 3 longest rows (ppo_micro_batch_size_per_gpu" in checked(command_line(*good, *rows))[1]
    assert "max_tokens 1234;" in checked(command_line(*good, *dynamic))[1] + ";"
    assert "max_tokens 64;" in checked(command_line(*good, *rows, "tree.max_tokens=64"))[1] + ";"


def test_the_banner_warns_of_a_key_that_verl_ignores(good: list[str]) -> None:
    warning = "trainer.balance_batch=False has no effect"
    assert warning in checked(command_line(*good, "trainer.balance_batch=false"))[1]
    assert "balance_batch" not in checked(command_line(*good))[1]
    # Greedy validation is verl's default.
    checked(command_line(*good, f"{ROLLOUT}.val_kwargs.temperature=0", f"{ROLLOUT}.temperature=0.7"))


def test_the_longer_key_wins_over_the_short_form(good: list[str]) -> None:
    overrides, _ = checked(command_line(*good, f"{ENGINE}.tree.max_tokens=64", "tree.max_tokens=4096"))
    config = compose(command_line(*good), overrides)
    assert config.actor_rollout_ref.actor.fsdp_config.tree.max_tokens == 64
    assert config.actor_rollout_ref.ref.fsdp_config.tree.max_tokens == 4096


@pytest.mark.parametrize(
    "stock", ([], ["data.train_batchsize=4"], [f"{ACTOR}.strategy=fsdp"], ["trainer.project_name=tree"])
)
def test_a_job_without_trees_is_left_to_verl(stock: list[str]) -> None:
    assert checked(command_line(*stock)) == (stock, "")


def test_a_stock_job_on_a_cpu_stays_a_stock_job(good: list[str]) -> None:
    stock = [argument for argument in good if argument != TREE] + ["trainer.project_name=tree_of_mine"]
    overrides, banner = checked(command_line(*stock))
    assert banner == "" and not any("strategy" in override for override in overrides)
    with pytest.raises(CommandLineError, match=r"^tree.mode: no engine of this job runs trees; add trainer"):
        checked(command_line(*stock, "tree.mode=tree"))


def test_other_programs_and_questions_to_hydra_are_left_alone() -> None:
    for arguments in (["my_main.py", "tree.max_tokens=0"], [main_ppo.__file__, "--cfg", "job", "tree.max_token=0"]):
        received = list(arguments)
        check_main_ppo(received)
        assert received == arguments


def test_a_flag_that_hydra_lacks_is_one_line(good: list[str]) -> None:
    with pytest.raises(CommandLineError, match="--confg"):
        command_line(*good, "--confg=x")


def test_an_environment_where_ray_starts_no_worker_is_one_line(
    good: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts workers by a shell to which it does not quote the path of Python: the job would wait and fail."""
    checked(command_line(*good))
    monkeypatch.setattr(sys, "executable", "/srv/my code/.venv/bin/python")
    with pytest.raises(CommandLineError, match=r"^/srv/my code/\.venv/bin/python: Ray cannot start workers"):
        checked(command_line(*good))
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # nodes have interpreters of their own
    checked(command_line(*good))


def test_the_real_driver_ends_before_ray(good: list[str], tmp_path: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *good, "tree.max_token=5"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("tree_rl")]
    assert said == [line for line in ended.stderr.splitlines() if not line.startswith("INFO")]
    assert len(said) == 1 and "did you mean tree.max_tokens?" in said[0]
    assert "ray init" not in ended.stdout
    assert not list(tmp_path.iterdir()), "Hydra's output folder is made by a job that runs"
    print(f"driver ended after {time.monotonic() - started:.1f} s, imports included")


def test_a_printed_remedy_with_an_interpolation_can_be_pasted(good: list[str]) -> None:
    correction = "algorithm.rollout_correction"
    wrong = [f"{correction}.bypass_mode=true", f"{correction}.loss_type=reinforce"]
    with pytest.raises(CommandLineError) as refused:
        checked(command_line(*good, *wrong, f"{ROLLOUT}.calculate_log_probs=true"))
    remedy = shlex.split(str(refused.value).partition("; set ")[2].replace(" and ", " "))
    assert f"+{ACTOR}.policy_loss.rollout_correction=${{{correction}}}" in remedy
    checked(command_line(*good, *wrong, f"{ROLLOUT}.calculate_log_probs=true", *remedy))
