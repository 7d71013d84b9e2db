"""Jobs that would hang, or die minutes after Ray has started, end before it: exit code 2, one line, key and remedy."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs_before_ray import assert_names, checked, write_job
from omegaconf import OmegaConf
from safetensors.numpy import save

from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.launch.command_line import read_job
from tree_rl.verl_plugin.launch.train import PROGRAM, make_ready
from tree_rl.verl_plugin.refusals.job import refuse_cluster
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

pytestmark = pytest.mark.usefixtures("job_of_its_own")
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SIZE = "ulysses_sequence_parallel_size"
WORKERS, REWARD = "ray_kwargs.ray_init.runtime_env.py_executable", "reward.custom_reward_function"
ON_GPUS = f"trainer.device=cuda ray_kwargs.ray_init.num_gpus=null {ROLLOUT}.name=hf"
SEPARATE = (
    f"trainer.v1.trainer_mode=tree_separate_async {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1 "
    f"{ROLLOUT}.checkpoint_engine.backend=mine +{ROLLOUT}.checkpoint_engine.custom_backend_module=my.backend "
    f"ray_kwargs.ray_init.num_gpus=2 {ACTOR}.ppo_mini_batch_size=256"
)
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path"
WRONG: list[tuple[str, ...]] = [
    # Packages and devices that this machine lacks.
    (f"{ROLLOUT}.name=vllm", "vllm is not installed", "pip install 'tree_rl[vllm]'"),
    (f"{ROLLOUT}.name=sglang", "sglang is not installed", "pip install"),
    (f"{ROLLOUT}.checkpoint_engine.backend=pigeon", "expected one of", "custom_backend_module; gloo's is tree_rl"),
    (f"{ON_GPUS} trainer.n_gpus_per_node=4", "=4, but this machine shows 2 GPUs", "machine=cpu"),
    ("trainer.n_gpus_per_node=2 ray_kwargs.ray_init.num_gpus=1", "=2, but ray_kwargs.ray_init.num_gpus=1", "correct"),
    ("ray_kwargs.ray_init.num_cpus=4", "verl would wait for 5 processors, but Ray has 4", "raise it"),
    ("tree.attention=fa4", "fa4 cannot run here: flash-attn-4", "auto"),
    (f"++{MODEL}.override_config.attn_implementation=flash_attention_4", "flash-attn-4 does not", "leave it out"),
    ("trainer.logger=[swanlab]", "swanlab is not installed", "pip install swanlab"),
    ("trainer.logger=[wandb]", "this machine is not logged in", "wandb login"),
    (f"{ACTOR}.optim.optimizer=AdamX", f"{ACTOR}.optim: Optimizer 'AdamX' not found in module 'torch.optim'"),
    (f"++{ACTOR}.optim.override_optimizer_config.foo=1", f"{ACTOR}.optim: ", "keyword argument 'foo'"),
    # Environments of workers.
    (f"{WORKERS}=/no/python", "no program /no/python", "leave the key out"),
    (f"{WORKERS}={{folder}}/bare/bin/python", "/bare has no tree_rl", "-m pip install tree_rl"),
    (
        f"'{WORKERS}=uv run --frozen --extra vllm --project {{folder}}'",
        *("neither {folder}/uv.lock nor {folder}/.venv has tree_rl", "--python {folder}/.venv/bin/python"),
    ),
    # Sizes that do not divide.
    (f"{ACTOR}.{SIZE}=3", f"{SIZE}=3 on 1 ranks", "divisor"),
    (f"{ACTOR}.{SIZE}=3 {MODEL}.use_remove_padding=true trainer.n_gpus_per_node=3", "num_attention_heads=32", "set"),
    (f"{ROLLOUT}.tensor_model_parallel_size=2", "on 1 GPUs", "divides"),
    ("data.train_batch_size=2048", "1,024 rows; lower it"),
    ("data.train_batch_size=2048 algorithm.filter_groups.enable=true", "1,024 rows; lower it"),
    ("data.train_max_samples=8", "data.train_batch_size=1024, but data.train_max_samples=8", "lower it"),
    ("data.gen_batch_size=3072", "=3072: verl fetches", "data.train_batch_size=1024; choose"),
    ("+data.mm_processor_kwargs.max_pixels=4096", "transformers ignores one bound", "kwargs.min_pixels too"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz=false", f"beside {ACTOR}.use_dynamic_bsz=True", "one value"),
    # Separate rollouts, for whose GPUs verl looks last.
    (
        f"{SEPARATE} ray_kwargs.ray_init.num_gpus=1",
        f"trainer.n_gpus_per_node=1 and {ROLLOUT}.n_gpus_per_node=1, but ray_kwargs.ray_init.num_gpus=1",
    ),
    (
        f"{SEPARATE} data.train_batch_size=1024 {ACTOR}.ppo_mini_batch_size=512",
        *("data.train_batch_size=1024: a step", "parameter_sync_step=4 updates", "product of both"),
    ),
    (f"{SEPARATE} {ROLLOUT}.nnodes=0", f"{ROLLOUT}.nnodes=0: separate rollouts"),
    (f"{SEPARATE} {ROLLOUT}.checkpoint_engine.backend=naive", "backend=naive does not reach separate rollouts", "nccl"),
    # Options of rewards where only verl's older trainers read them.
    ("reward_model.reward_manager=dapo", "trainers do not read it", "set reward.reward_manager.name=dapo"),
    (
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
        *("do not read it", "set +reward.reward_kwargs.overlong_buffer_cfg.len=4"),
    ),
    ("reward.reward_manager.name=prime", "reward.reward_manager.name: Unknown reward manager: prime"),
    ("custom_reward_function.path={folder}/a.py", "do not read it", f"set {REWARD}.path={{folder}}/a.py"),
    # What ends the run after the first rollouts.
    ("algorithm.rollout_correction.rollout_is=tokens", "algorithm.rollout_correction: Invalid rollout_is: tokens"),
    ("algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction: rollout_rs_threshold must"),
    ("algorithm.kl_penalty=low_var_kll", "no such choice; did you mean low"),
    (f"{ACTOR}.policy_loss.loss_mode=dro", "dro without a", "dro_beta above 0"),
    # Adapters.
    (f"{ROLLOUT}.name=hf {MODEL}.lora_rank=4", f"=hf with {MODEL}.lora_rank=4", f"set {MODEL}.lora.merge=True"),
    (
        f"{MODEL}.lora_rank=4 {MODEL}.lora.merge=true {ACTOR}.checkpoint.save_contents=[model,hf_model]",
        *(f"{ACTOR}.checkpoint.save_contents: with {MODEL}.lora_rank=4", "verl.model_merger merge"),
    ),
    # Files.
    ("data.prompt_key=question", "is none of its columns, prompt", "correct"),
    ("data.val_files={folder}/none.parquet", "expected at least one row"),
    ("data.train_files={folder}/half.parquet", "expected a whole parquet file", "correct"),
    ("data.train_files={folder}/rows.csv", "verl reads files that end in .parquet, .json", "correct"),
    (f"{MODEL}.path={{folder}}/bare", "the folder has no config", "save"),
    (f"{MODEL}.tokenizer_path={{folder}}/bare", "the folder has no tokenizer", "save the tokenizer"),
    *(
        (f"{key}={{folder}}/{place}", f"{key}={{folder}}/{place}: its {said}", "download it again")
        for key, place, said in (
            (f"{MODEL}.path", "cut", "model.safetensors is damaged: Error while deserializing header: incomplete"),
            (f"{MODEL}.path", "empty", "tokenizer.json is damaged: Expecting value"),
            (f"{MODEL}.tokenizer_path", "listed", "tokenizer_config.json is damaged: expected a JSON object"),
        )
    ),
    (f"{REWARD}.path={{folder}}/reward.py", "it defines no compute_score", f"{REWARD}.name"),
    (f"{REWARD}.path={{folder}}/rows.csv", "Python cannot read it", "correct it"),
    (f"{RESUME}={{folder}}/global_step_9", "expected an existing folder", "resume_mode=auto"),
    (
        "trainer.resume_mode=auto trainer.default_local_dir={folder}/run trainer.n_gpus_per_node=2",
        *("trainer.resume_mode=auto: {folder}/run/global_step_4 was saved by 4 ranks, and this job has 2", "merger"),
    ),
    (
        f"{RESUME}={{folder}}/run/global_step_4/",
        "trainer.resume_mode=resume_path: {folder}/run/global_step_4 was saved by 4 ranks, and this job has 1",
    ),
    ("trainer.default_local_dir={folder}/rows.csv/a", "{folder}/rows.csv is no folder", "another"),
    (f"+{ROLLOUT}.custom.tree_dump_dir={{folder}}/rows.csv", "{folder}/rows.csv is no folder"),
    # What ends every session.
    (f"{ROLLOUT}.val_kwargs.n=0", "expected a whole number of at least 1"),
    (f"{ROLLOUT}.agent.default_agent_loop=mine", "no such agent loop", "expected one of"),
    ("data.train_files={folder}/loops.parquet", "agent_name mine is none of", "single_turn_agent"),
    (f"{ROLLOUT}.agent.agent_loop_config_path={{folder}}/loops.yaml", "no module of absent.Loop here", "PYTHONPATH"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that jobs name, and a project of uv without tree_rl."""
    folder = tmp_path_factory.mktemp("files")
    write_job(folder)
    whole = (folder / "rows.parquet").read_bytes()
    (folder / "half.parquet").write_bytes(whole[: len(whole) // 2])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "none.parquet")
    pq.write_table(pa.table({"prompt": ["a"] * 1024, "agent_name": ["mine"] * 1024}), folder / "loops.parquet")
    named = pa.table({"prompt": ["a"] * 1024, "agent_name": ["tree_tool_agent"] * 1024})
    pq.write_table(named, folder / "own_loops.parquet")
    for place, name, content in (
        ("cut", "model.safetensors", save({"w": np.zeros(1000)})[:1000]),
        ("empty", "tokenizer.json", b""),
        ("listed", "tokenizer_config.json", b"[]"),
    ):
        (folder / place).mkdir()
        write_job(folder / place)
        (folder / place / name).write_bytes(content)
    (folder / "run/global_step_4/actor").mkdir(parents=True)
    (folder / "run/global_step_4/actor/model_world_size_4_rank_0.pt").touch()
    (folder / "run/latest_checkpointed_iteration.txt").write_text("4")
    (folder / "killed").mkdir()
    (folder / "killed/latest_checkpointed_iteration.txt").write_bytes(b"\0\xff")
    (folder / "rows.csv").write_text("a,b\n1 2\n")
    (folder / "reward.py").write_text("def score(): ...\n")
    (folder / "loops.yaml").write_text("- {name: mine, _target_: absent.Loop}\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "verl"\n')
    (folder / "uv.lock").write_text('[[package]]\nname = "verl"\n')
    make_environment(folder / "bare")
    return folder


def make_environment(folder: Path) -> Path:
    """A virtual environment's files, without packages; returns the folder of packages."""
    for name in ("python", "uv"):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "pyvenv.cfg").touch()
    packages = folder / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    return packages


@pytest.fixture
def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with uv and two GPUs, and without vLLM, SGLang, flash-attn-4 and accounts."""
    for module in ("vllm", "sglang", "swanlab"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "PYTHONPATH", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{folder}/bare/bin{os.pathsep}{os.environ['PATH']}")


def words(argument: str, folder: Path) -> list[str]:
    """The overrides of a case; quotes hold one with spaces together."""
    text = argument.format(folder=folder)
    return [text.strip("'")] if text.startswith("'") else text.split()


def refused_line(capsys: Any, *arguments: str) -> str:
    """What the driver says in one line before it ends with exit code 2."""
    config, given = read_job(arguments, PROGRAM)
    with pytest.raises(SystemExit, match=r"^2$"):
        make_ready(config, given)
    line = capsys.readouterr().err
    assert line.startswith("tree_rl: ") and line.endswith("\n")
    return line.rstrip("\n")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("case", WRONG, ids=[argument for argument, *_ in WRONG])
def test_a_wrong_job_ends_in_one_line(case: tuple[str, ...], folder: Path, good: list[str], capsys: Any) -> None:
    given, said = words(case[0], folder), [part.format(folder=folder) for part in case[1:]]
    assert_names(refused_line(capsys, *good, *given), given, *said)


@pytest.mark.usefixtures("machine")
def test_a_cpu_job_is_refused_if_verl_sees_gpus(good: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(compat, "get_device_name", lambda: "cuda")
    line = refused_line(capsys, *good, "machine=cpu")
    assert "trainer.device=cpu, but verl runs on cuda" in line and "VERL_PLATFORM=cpu" in line


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "right",
    (
        f"{ON_GPUS} trainer.n_gpus_per_node=2 ray_kwargs.ray_init.num_cpus=15",
        f"'{WORKERS}=uv run --with tree_rl python'",
        f"'{WORKERS}=uv run --frozen --project {{folder}}/locked'",
        f"'{WORKERS}=\"uv -v run --frozen --project={{folder}}/installed\"'",
        f"{WORKERS}={{folder}}/installed/.venv/bin/python",
        f"{ACTOR}.{SIZE}=2 {MODEL}.use_remove_padding=true trainer.n_gpus_per_node=2",
        "data.train_batch_size=512 data.gen_batch_size=128 data.train_max_samples=512",
        "data.gen_batch_size=3072 algorithm.filter_groups.enable=true",
        "+data.mm_processor_kwargs.min_pixels=64 +data.mm_processor_kwargs.max_pixels=4096",
        "reward_model.enable=false reward_model.reward_manager=naive",
        f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=k3+ algorithm.kl_penalty=low_var_kl+",
        f"{SEPARATE} {ACTOR}.ppo_mini_batch_size=512 trainer.v1.separate_async.parameter_sync_step=2",
        f"{REWARD}.path={{folder}}/reward.py {REWARD}.name=score reward.reward_manager.name=mine",
        f"+{ROLLOUT}.agent.agent_loop_manager_class=my.Manager data.train_files={{folder}}/loops.parquet",
        # Its prompts name another loop.
        f"{ROLLOUT}.agent.default_agent_loop=tree_gateway_agent data.train_files={{folder}}/own_loops.parquet",
        *(f"tree.path_weighting=custom tree.custom_weights={name}" for name in ("gain", "math.fsum")),
        "trainer.logger=[console] trainer.resume_from_path=null",
        f"{RESUME}={{folder}}/run/global_step_4/ trainer.n_gpus_per_node=4",
        "trainer.default_local_dir={folder}/run trainer.resume_mode=disable",
        "trainer.default_local_dir={folder}/killed",
        f"{ROLLOUT}.checkpoint_engine.backend=mine +{ROLLOUT}.checkpoint_engine.custom_backend_module=my.backend",
        # A library that workers import may register these names.
        f"{MODEL}.external_lib=my_lib algorithm.adv_estimator=my_grpo {ACTOR}.policy_loss.loss_mode=my_vanilla",
    ),
)
def test_a_right_job_runs(right: str, folder: Path, good: list[str]) -> None:
    for name in ("locked", "installed"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "pyproject.toml").touch()
    (folder / "locked" / "uv.lock").write_text('[[package]]\nname = "tree-rl"\n')
    if not (folder / "installed" / ".venv").exists():
        (make_environment(folder / "installed" / ".venv") / "tree_rl-0.1.0.dist-info").mkdir()
    assert checked(*good, *words(right, folder))[1]


@pytest.mark.usefixtures("machine")
def test_a_head_without_gpus_starts_jobs(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight = [*good, *f"{ON_GPUS} trainer.n_gpus_per_node=8 ray_kwargs.ray_init.num_cpus=null".split()]
    with pytest.raises(UnsupportedFeatureError, match="this machine shows 2 GPUs"):
        checked(*eight)
    assert checked(*eight, "+ray_kwargs.ray_init.address=10.0.0.1:6379")[1]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").touch()
    assert checked(*eight)[1]
    (tmp_path / "ray/ray_current_cluster").unlink()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert checked(*eight)[1]
    with pytest.raises(UnsupportedFeatureError, match="this machine shows 2 GPUs"):
        checked(*eight, "+ray_kwargs.ray_init.address=local")


@pytest.mark.parametrize(("gpus", "runs"), (([8, 8], True), ([0, 16], True), ([4, 4, 4, 4], False), ([8], False)))
def test_nodes_have_the_gpus_of_a_job(gpus: list[int], runs: bool) -> None:
    """verl compares the total, 16 GPUs in three of these, and then waits for groups of 8."""
    trainer = OmegaConf.create({"n_gpus_per_node": 8, "nnodes": 2})
    nodes = [{"Alive": True, "Resources": {"GPU": float(count)} if count else {}} for count in gpus]
    nodes.append({"Alive": False, "Resources": {"GPU": 8.0}})
    if runs:
        refuse_cluster(trainer, nodes)
        return
    found = ", ".join(map(str, gpus))
    with pytest.raises(UnsupportedFeatureError) as refused:
        refuse_cluster(trainer, nodes)
    said = f"trainer.n_gpus_per_node=8 on 2 nodes, but Ray's nodes have {found} GPUs; set it and trainer.nnodes to"
    assert str(refused.value).startswith(said)
