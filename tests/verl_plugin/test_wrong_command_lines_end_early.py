"""A wrong command line of tree training: one line that names the key and the remedy, exit code 2, before Ray."""

import copy
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from jobs_before_ray import TREE, assert_names, checked
from omegaconf import OmegaConf

from tree_rl.rollout.agents.agents_by_name import IN_ENVIRONMENT
from tree_rl.verl_plugin.compat import constants_ppo
from tree_rl.verl_plugin.launch import command_line, train
from tree_rl.verl_plugin.launch.command_line import read_job
from tree_rl.verl_plugin.launch.session_agent import GATEWAY_AGENT as AGENT
from tree_rl.verl_plugin.launch.session_agent import TREE_AGENT, refuse_unknown_agent
from tree_rl.verl_plugin.launch.short_forms import CommandLineError
from tree_rl.verl_plugin.refusals import this_machine

pytestmark = pytest.mark.usefixtures("job_of_its_own")
ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "model", "rollout"))
ENGINE = f"{ACTOR}.fsdp_config"
AS_STOCK = f"trainer.v1.trainer_mode=sync +{MODEL}.model_type=tree_language_model"
"""verl's own trainer with a tree engine."""
GATEWAY_LOOP = f"{ROLLOUT}.agent.default_agent_loop=tree_gateway_agent"
CUSTOM_WEIGHTS = "tree.mode=tree tree.path_weighting=custom tree.custom_weights"
CORRECTION, LOG_PROBS = "algorithm.rollout_correction", f"{ROLLOUT}.calculate_log_probs"
WRONG: list[tuple[str, ...]] = [
    # What trees do not run on.
    (f"{ACTOR}.strategy=fsdp", f"{ACTOR}.strategy=fsdp:", f"set {ACTOR}.strategy=fsdp2"),
    ("trainer.use_v1=false", "trainer.use_v1=False:", "set it to true"),
    # Mistyped choices.
    (f"{MODEL}.model_type=tree_languagemodel", "did you mean tree_language_model?"),
    ("trainer.v1.trainer_mode=tree_synk", "did you mean tree_sync?"),
    ("algorithm.adv_estimator=grp0", "did you mean grpo?"),
    ("algorithm.adv_estimator=no_such_file.credit", "algorithm.adv_estimator: no_such_file.credit", "PYTHONPATH"),
    ("algorithm.adv_estimator=gigpo +algorithm.credit.omga=1", "no option 'omga'", "omega, gamma, by_std, states"),
    ("algorithm.adv_estimator=gigpo +algorithm.credit.states=observed", "'observed': expected reported or observation"),
    ("algorithm.adv_estimator=rtmc +algorithm.credit.prior=-1", "{'prior': -1}: expected finite numbers"),
    ("algorithm.adv_estimator=gigpo +algorithm.credit.gamma=high", "algorithm.credit: adv_estimator=gigpo:"),
    *(
        (f"+algorithm.credit={value} algorithm.adv_estimator=gigpo", "algorithm.credit=", "expected options with their")
        for value in ("[]", "[by_std]", "high")
    ),
    *(
        (f"algorithm.norm_adv_by_std_in_grpo=false algorithm.adv_estimator={name}", "does not read it", remedy)
        for name, remedy in (("gigpo", "set +algorithm.credit.by_std=False"), ("tree_grpo", "set it to True"))
    ),
    ("+algorithm.credit.omega=1 algorithm.adv_estimator=grpo", "adv_estimator=grpo takes no options"),
    *(
        (f"{CUSTOM_WEIGHTS}={name}", f"{ENGINE}.tree.custom_weights: {said}", remedy)
        for name, said, remedy in (
            ("no_such_file.f", "no_such_file.f: No module named", "PYTHONPATH"),
            ("math.pi", "'math.pi' is no function of a CreditTree", "nor an entry"),
            ("'.'", ".: Empty module name", "correct the name"),
            ("''", "'' is no function", "nor an entry of the rows"),
        )
    ),
    (f"{ROLLOUT}.name=vlm", "did you mean vllm?"),
    (f"{ACTOR}.policy_loss.loss_mode=vanila", "did you mean vanilla?"),
    ("machine=cpuu", "did you mean cpu?"),
    ("trainer.logger=[consle]", "did you mean console?"),
    # Mistyped keys.
    (f"{ACTOR}.strateg=fsdp2", f"did you mean {ACTOR}.strategy?"),
    (f"+{ACTOR}.strateg=fsdp2", f"did you mean {ACTOR}.strategy?"),
    ("actor_rolout_ref.actor.strategy=fsdp2", f"did you mean {ACTOR}.strategy?"),
    ("data.train_batch_size", "data.train_batch_size: no KEY=VALUE"),
    ("tree=4096", "tree.max_tokens=4096"),
    ("--confg=x", "--confg"),
    # Options of trees, under the key that the user wrote.
    ("tree.max_token=5", "did you mean tree.max_tokens?"),
    ("tree.max_tokens=-3", "positive integer"),
    ("tree.max_tokens=abc", "auto or null"),
    ("tree.attention=fa5", "fa4"),
    (f"{ENGINE}.tree.mod=tree", "no such option"),
    # What would train on NaN, or on other rows' advantages.
    *((f"{ROLLOUT}.temperature={value}", "above 0") for value in ("0", "-0.7", "nan", "null", "true")),
    (f"{ROLLOUT}.temperature=warm", "expected a number"),
    (f"{ROLLOUT}.val_kwargs.temperature=-1", "0 (greedy)"),
    (f"{ROLLOUT}.temperature=0 {AS_STOCK}", f"{ROLLOUT}.temperature=0:", "above 0"),
    ("algorithm.use_pf_ppo=true", "set it to False"),
    # Corrections of stale rollouts that would not happen.
    (f"{CORRECTION}.rollout_is=token {LOG_PROBS}=false", f"{CORRECTION}.rollout_is=token", "log_probs=False"),
    (f"{CORRECTION}.rollout_rs=token_k1 {LOG_PROBS}=false", f"{CORRECTION}.rollout_rs=token_k1", "log_probs=False"),
    (f"{CORRECTION}.bypass_mode=true {LOG_PROBS}=false", f"{CORRECTION}.bypass_mode=True", "log_probs=False"),
    (
        f"{CORRECTION}.rollout_rs=token_k1 {CORRECTION}.bypass_mode=true {LOG_PROBS}=true",
        "policy_loss.loss_mode=vanilla ignores it",
    ),
    # Values and files.
    (f"{ROLLOUT}.n=0", "at least 1"),
    (f"{ACTOR}.optim.lr=abc", "expected a number"),
    (f"{ACTOR}.use_dynamic_bsz=maybe", "true or false"),
    (f"{MODEL}.path=/nowhere", "no such folder"),
    ("data.train_files=/nowhere.parquet", "no such file"),
    # Values of another type.
    ("data.train_batch_size=null", "expected a whole number of at least 1"),
    *((f"{key}=null", "expected a whole number") for key in ("data.train_max_samples", "trainer.critic_warmup")),
    ("data.gen_batch_size=0", "at least 1, or null"),
    ("trainer.resume_mode=never", "expected one of auto, disable, resume_path"),
    *((asked, "expected a text") for asked in ("trainer.resume_mode=null", "trainer.default_local_dir=1")),
    ("trainer.max_actor_ckpt_to_keep=all", "expected a whole number or null"),
    (f"{MODEL}.lora_rank=null", "expected a whole number"),
    (f"{ENGINE}.fsdp_size=0", "on 1 ranks:", "-1 for all"),
    (f"++{ENGINE}.tree=auto", "='auto': expected options with their names"),
    *(
        (f"tree.router_aux_loss_coef={value}", f"={said} with", "expected a finite number of at least 0")
        for value, said in (("low", "'low'"), ("inf", "inf"), ("true", "True"))
    ),
    ("tree.custom_weights=null", "expected a text"),
    (f"++{ROLLOUT}.engine_kwargs.hf.kv_cache_bytes=2GB", "='2GB': expected a whole number"),
    (f"++{ROLLOUT}.engine_kwargs.hf.cache=1", "no such option", "kv_cache_bytes"),
    (f"++{AGENT}=react", "expected options with their names"),
    (f"+{AGENT}.seed=1.5 +{AGENT}.agent=a.B", "seed=1.5: expected a whole number or null"),
    (f"+{AGENT}.gateway.side_calls=[title] +{AGENT}.agent=a.B", "side_calls=['title']: expected a list"),
    (f"+{AGENT}.branching=tail +{AGENT}.agent=a.B", "branching='tail': expected options with their names"),
    # What would end the run after the rollouts, or every session of it.
    ("trainer.save_freq=after_each_epoch", "expected a number of steps"),
    (f"{ROLLOUT}.enable_rollout_routing_replay=true", "=R3"),
    (f"{MODEL}.lora_adapter_path=/no {MODEL}.lora_rank=4", f"{MODEL}.lora_adapter_path=/no:", "no such file"),
    ("tree.reuse_log_probs=true algorithm.use_kl_in_reward=true", "reuse_log_probs=True, but", "set it to auto"),
    (f"{ENGINE}.fsdp_size=2 trainer.n_gpus_per_node=3", f"{ENGINE}.fsdp_size=2 on 3 ranks:", "divisor"),
    (f"+{ROLLOUT}.custom.tree_agent.max_turn=3", "no such option", "max_turns"),
    (f"+{ROLLOUT}.custom.tree_agent.parallel_tools=many", "parallel_tools='many'"),
    (f"+{AGENT}.agent=no_module.Agent", "No module named", "PYTHONPATH"),
    (f"+{AGENT}.agent=tree_rl.rollout.agents.in_environment.Agent", "in_environment.Agent: module", "has no attribute"),
    (f"+{AGENT}.branching.policy=entropy {LOG_PROBS}=false", "=entropy reads log-probs", "to True"),
    (f"+{AGENT}.agent=ast.AST +{AGENT}.branching.policy=tail", "branching: ast.AST has no `record`", "AgentInEnvir"),
    (GATEWAY_LOOP, f"tree_gateway_agent needs {AGENT}.agent; set it to"),
    (f"{GATEWAY_LOOP} +{AGENT}.agent_options.agent=react", f"tree_gateway_agent needs {AGENT}.agent; set it to"),
    (f"{GATEWAY_LOOP} +{ROLLOUT}.custom.gateway_agnt.agent=a.B", "rename", "custom.gateway_agnt, which"),
    (f"{ROLLOUT}.agent.default_agent_loop=tree_gateway_agnt", "no such agent", "did you mean tree_gateway_agent?"),
    (f"tree.reuse_log_probs=true {AS_STOCK}", "tree.reuse_log_probs=True:", "trainer_mode=tree_sync"),
    # Keys in another section: the hint names one that exists.
    ("critic.model.fsdp_config.param_offload=true", "did you mean critic.fsdp.param_offload?"),
    ("data.train_files=[a", "data.train_files=[a:", "quote it"),
]


@pytest.mark.parametrize("case", WRONG, ids=[argument for argument, *_ in WRONG])
def test_one_line_names_the_key_and_the_remedy(case: tuple[str, ...], good: list[str]) -> None:
    argument, *said = case
    with pytest.raises(ValueError) as refused:
        checked(*good, *argument.split())
    assert_names(str(refused.value), argument.split(), *said)


def test_a_mistyped_folder_is_no_hubs_id(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs" / "tiny_model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(this_machine, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError, match=rf"^{MODEL}\.path=outputs/tiny_modle: no such folder on this machine; "):
        checked(*good, f"{MODEL}.path=outputs/tiny_modle")
    checked(*good, f"{MODEL}.path=Someone/Small")
    (tmp_path / "hub" / "models--outputs--tiny_modle").mkdir(parents=True)
    checked(*good, f"{MODEL}.path=outputs/tiny_modle")


def test_a_stock_config_runs_on_fsdp2_and_says_so(good: list[str], recwarn: pytest.WarningsRecorder) -> None:
    config, banner = checked(*good, "tree.max_tokens=4096")
    assert not [one for one in recwarn if "critic" in str(one.message)], "verl itself warns of it later"
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "fsdp2"
    for engine in (config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config):
        assert (engine.tree.max_tokens, engine._target_) == (4096, train.ENGINE_CONFIG)
    assert config.actor_rollout_ref.rollout.name == "hf" and config.trainer.device == "cpu"
    for fact in ("fsdp2 in place of verl's default fsdp", "tree_language_model", "tree_sync", "max_tokens 4096"):
        assert fact in banner
    assert "\n" not in banner


def test_the_banner_names_the_budget_that_decides_and_a_key_that_verl_ignores(good: list[str]) -> None:
    rows = [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"]
    rows.append(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=3")
    dynamic = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1234"]
    assert "max_tokens of 3 longest rows (ppo_micro_batch_size_per_gpu" in checked(*good, *rows)[1]
    assert "max_tokens 1234;" in checked(*good, *dynamic)[1] + ";"
    # Greedy validation is verl's default.
    passes = ["trainer.balance_batch=false", f"{ROLLOUT}.val_kwargs.temperature=0", f"{ROLLOUT}.temperature=0.7"]
    banner = checked(*good, *rows, "tree.max_tokens=64", *passes)[1]
    assert "max_tokens 64;" in banner and "trainer.balance_batch=False has no effect" in banner
    assert "balance_batch" not in checked(*good)[1]


def test_the_longer_key_wins_over_the_short_form(good: list[str]) -> None:
    config, _ = checked(*good, f"{ENGINE}.tree.max_tokens=64", "tree.max_tokens=4096")
    assert config.actor_rollout_ref.actor.fsdp_config.tree.max_tokens == 64
    assert config.actor_rollout_ref.ref.fsdp_config.tree.max_tokens == 4096


@pytest.mark.parametrize(("block", "mode"), (("null", "auto"), ("{mode:tree}", "tree")))
@pytest.mark.parametrize("plus", ("", "++"))
def test_the_block_of_an_engine_is_written_as_a_whole(plus: str, block: str, mode: str, good: list[str]) -> None:
    config, banner = checked(*good, f"{plus}{ENGINE}.tree={block}")
    assert f"mode {mode};" in banner and config.actor_rollout_ref.actor.fsdp_config._target_ == train.ENGINE_CONFIG
    stock = [argument for argument in good if argument != TREE]
    with pytest.raises(CommandLineError, match=rf"^{ENGINE}\.tree: no engine of this job runs trees; add trainer"):
        checked(*stock, f"{plus}{ENGINE}.tree={block}")


@pytest.mark.parametrize("stock", ([], [f"{ACTOR}.strategy=fsdp"], ["trainer.project_name=tree"]))
def test_a_job_without_trees_is_left_to_verl(stock: list[str]) -> None:
    config, given = read_job(stock, train.PROGRAM)
    before = copy.deepcopy(config)
    assert train.checked(config, given) == "" and config == before


def test_a_stock_job_on_a_cpu_stays_a_stock_job(good: list[str]) -> None:
    stock = [argument for argument in good if argument != TREE] + ["trainer.project_name=tree_of_mine"]
    config, banner = checked(*stock)
    assert banner == "" and config.actor_rollout_ref.actor.strategy == "fsdp"
    with pytest.raises(CommandLineError, match=r"^tree.mode: no engine of this job runs trees; add trainer"):
        checked(*stock, "tree.mode=tree")


def test_the_composed_config_is_hydras(good: list[str]) -> None:
    """Values are set after the composition, where they can be compared with what stood there."""
    values = [f"{ACTOR}.optim.lr=1e-6", f"+{ACTOR}.of_mine={{a:[1,2],b:${{data.seed}}}}", "data.seed=7"]
    values += [f"++{MODEL}.override_config.x=null", "data.train_files=[a,b]", "trainer.project_name='a b'"]
    values.append("~critic.optim")
    given = [*(one for one in good if "data.train_files" not in one), *values]
    found, _ = read_job(given, train.PROGRAM)
    with command_line.initialize_config_dir(str(train.PROGRAM.folder / "config"), version_base=None):
        assert found == compose(train.PROGRAM.config_name, train.PROGRAM.expand(given, train.PROGRAM.config_name))


def test_an_environment_where_ray_starts_no_worker_is_told(good: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts workers by a shell to which it does not quote the path of Python: the job would wait and fail."""
    checked(*good)
    monkeypatch.setattr(sys, "executable", "/srv/my code/.venv/bin/python")
    with pytest.raises(CommandLineError, match=r"^/srv/my code/\.venv/bin/python: Ray cannot start workers"):
        checked(*good)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # nodes have interpreters of their own
    checked(*good)


@pytest.mark.slow
def test_the_real_driver_ends_before_ray(good: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tree_rl.train", *good, "tree.max_token=5"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("tree_rl")]
    assert said == [line for line in ended.stderr.splitlines() if not line.startswith("INFO")]
    assert len(said) == 1 and "did you mean tree.max_tokens?" in said[0]
    assert "ray init" not in ended.stdout
    assert not list(tmp_path.iterdir())


def test_verls_own_driver_is_checked_before_ray(good: list[str], tmp_path: Path) -> None:
    """Hydra reads the command line by itself; the plugin sees the config where verl asks for Ray's environment."""
    plain = ["hydra.searchpath=[pkg://tree_rl.verl_plugin.config]", "+machine=cpu", *good[:1], *good[2:]]
    plain.append(f"{MODEL}.use_fused_kernels=true")
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *plain]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("tree_rl")]
    assert ended.returncode == 2 and f"{MODEL}.use_fused_kernels" in line and "the head of a tree" in line, ended.stderr
    assert "ray init" not in ended.stdout and "Traceback" not in ended.stderr


def test_a_short_form_that_hydra_took_is_refused(good: list[str]) -> None:
    config, _ = read_job(good, train.PROGRAM)
    OmegaConf.update(config, "tree.max_tokens", 64, force_add=True)
    with pytest.raises(ValueError, match=rf"^tree\.max_tokens: .*write it as \+\+{ENGINE}\.tree\.max_tokens$"):
        train.checked(config, ["+tree.max_tokens=64"])


def test_a_printed_remedy_with_an_interpolation_can_be_pasted(good: list[str]) -> None:
    wrong = [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"]
    with pytest.raises(ValueError) as refused:
        checked(*good, *wrong, f"{LOG_PROBS}=true")
    remedy = shlex.split(str(refused.value).partition("; set ")[2].replace(" and ", " "))
    assert f"+{ACTOR}.policy_loss.rollout_correction=${{{CORRECTION}}}" in remedy
    checked(*good, *wrong, f"{LOG_PROBS}=true", *remedy)
    rejects = ["rollout_is=sequence", "rollout_rs=seq_max_k2", "rollout_rs_threshold=2.0"]
    for others in (rejects, ["bypass_mode=true", "rollout_is=token"]):
        checked(*good, *(f"{CORRECTION}.{other}" for other in others), f"{LOG_PROBS}=true")


UNCONFINED = {"sandbox": {"unconfined": True}}


def sessions_of(options: dict[str, Any], agent: str = IN_ENVIRONMENT) -> Any:
    """The part of a config about sessions, which the driver reads just before it starts Ray."""
    made = OmegaConf.create({"trainer": {"nnodes": 1}})
    OmegaConf.update(made, AGENT, {"agent": agent, "agent_options": options}, force_add=True)
    return made


def test_the_driver_starts_nothing_for_an_agent_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        constants_ppo.get_ppo_ray_runtime_env(sessions_of({"agent": "command_line", "options": {"max_turns": 3}}))
    said = capsys.readouterr().err
    assert "agent_options.options.max_turns: no such option" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"options": {"max_turns": "many"}}, "agent_options.options.max_turns='many': expected a whole number"),
        ({"sandbox": {"backend": "dockr"}}, "agent_options.sandbox.backend='dockr': "),
        ({"sandbox": {"unconfined": "no"}}, "agent_options.sandbox.unconfined='no': expected true or false"),
        ({"sandbox": {"readable": "/opt"}}, "agent_options.sandbox.readable='/opt': expected a list"),
        (
            {"sandbox": {"limits": {"processes": "1"}}},
            "agent_options.sandbox.limits.processes='1': expected a whole number",
        ),
        ({"sandbox": {"limits": {"memory": 1}}}, "agent_options.sandbox.limits.memory: no such option"),
        ({"sandbox": "docker"}, "agent_options.sandbox='docker': expected options with their names or null"),
        ({"timeout_seconds": "long"}, "agent_options.timeout_seconds='long': expected a number or null"),
    ],
)
def test_a_value_of_another_type_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_unknown_agent(sessions_of(options))


@pytest.mark.parametrize("key", [AGENT, TREE_AGENT])
def test_without_bubblewrap_only_unconfined_sessions_start(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.rollout.sandbox.sandbox.why_no_bubblewrap", lambda: "not found")
    refused = sessions_of({}) if key == AGENT else OmegaConf.create({"trainer": {"nnodes": 1}})
    OmegaConf.update(refused, key, {}, force_add=True, merge=True)
    with pytest.raises(ValueError, match=r"apt install bubblewrap.*agent_options\.sandbox\.unconfined=true"):
        refuse_unknown_agent(refused)
    refuse_unknown_agent(sessions_of(UNCONFINED))


def test_other_agents_and_other_jobs_pass() -> None:
    for passes in (None, OmegaConf.create({}), sessions_of({"x": 1}, agent="my.Agent"), sessions_of(UNCONFINED)):
        refuse_unknown_agent(passes)
