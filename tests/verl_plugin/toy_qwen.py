"""A Qwen3-shaped model, tokenizer and data set of a few kilobytes, for tests that start verl."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import tiny_model

PROMPTS = [f"say {number}" for number in range(8)]
RECIPES = Path(__file__).parents[2] / "recipes"
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
"""Mixed precision of an engine, as an override."""

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content and not loop.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and Qwen's special tokens."""
    return tiny_model.build_tokenizer(TEMPLATE, added=tiny_model.MARKUP)


def save_model(folder: Path, config_class: type[PretrainedConfig] = Qwen3Config, **more: Any) -> str:
    """Write model and tokenizer; return the path.

    Args:
        folder: to write to.
        config_class: of another family of Qwen3's sizes.
        more: entries that the family adds to its config.
    """
    tokenizer = build_tokenizer()
    model = tiny_model.build_model(tokenizer, seed=0, config_class=config_class, intermediate_size=96, **more)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_recipe_script(name: str, *arguments: Path | str) -> None:
    """Run a script of the recipes in this process, which has imported already what it needs."""
    with mock.patch.object(sys, "argv", [name, *map(str, arguments)]):
        runpy.run_path(str(RECIPES / name), run_name="__main__")


def save_prompts(path: Path, texts: list[str], task: Mapping[str, Any] | None = None, **columns: Any) -> str:
    """Write a data set of user prompts in verl's format, each with the same task; return the path."""
    shared = {"data_source": "toy", "reward_model": {"style": "rule", "ground_truth": "a"}, **columns}
    rows = [
        {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": index, **(task or {})}, **shared}
        for index, text in enumerate(texts)
    ]
    pandas.DataFrame(rows).to_parquet(path)
    return str(path)


def save_reward(path: Path) -> str:
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(character in 'aeiou' for character in solution_str) / (1 + len(solution_str))\n"
    )
    return str(path)


def under(node: str, *options: str) -> list[str]:
    """Hydra overrides of options of one node."""
    return [f"{node}.{option}" for option in options]


def ppo_overrides(model: str, data: str, reward: str, out: Path) -> list[str]:
    """Hydra overrides that run verl's stock `main_ppo` on two CPU cores with the embedded rollout engine."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *under("data", f"train_files={data}", f"val_files={data}", "train_batch_size=4", "dataloader_num_workers=0"),
        *under("data", "max_prompt_length=64", "max_response_length=96", "return_raw_chat=True"),
        *under("actor_rollout_ref.model", f"path={model}", "use_remove_padding=True"),
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        *under(actor, "strategy=fsdp2", "ppo_mini_batch_size=4", "use_kl_loss=False"),
        *under(actor, "use_dynamic_bsz=True", "ppo_max_token_len_per_gpu=4096"),
        *under(f"{actor}.fsdp_config", "model_dtype=fp32", "use_torch_compile=False"),
        f"+{actor}.fsdp_config.mixed_precision={FLOAT32}",
        *under(rollout, "name=hf", "n=3", "dtype=float32", "tensor_model_parallel_size=1", "agent.num_workers=1"),
        *under(rollout, "log_prob_use_dynamic_bsz=True", "log_prob_max_token_len_per_gpu=4096"),
        f"{rollout}.calculate_log_probs=True",
        *under("algorithm", "adv_estimator=grpo", "use_kl_in_reward=False"),
        *under("reward", f"custom_reward_function.path={reward}", "num_workers=1"),
        *under("trainer", "device=cpu", "nnodes=1", "logger=[console]", f"default_local_dir={out}"),
        *under("trainer", "val_before_train=False", "test_freq=-1", "save_freq=-1", "total_training_steps=2"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "ray_kwargs.ray_init.num_cpus=24",
    ]


MANAGER = "tree_rl.verl_plugin.agent_loops.prompt_forests.TreeAgentLoopManager"
TREE_MANAGER = f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}"


def gateway_overrides(folder: Path, model: str, agent: str) -> list[str]:
    """Hydra overrides of a job in which agents play the turns through the gateway and `tree_sync` trains them.

    Args:
        folder: data and reward go there; the job puts its checkpoints into `out` and its rows into `trees` below it.
        model: its path.
        agent: dotted name of the agents' class.
    """
    data = save_prompts(folder / "prompts.parquet", PROMPTS, agent_name="tree_gateway_agent")
    return [
        *ppo_overrides(model, data, save_reward(folder / "reward.py"), folder / "out"),
        TREE_MANAGER,
        f"+actor_rollout_ref.rollout.custom.gateway_agent.agent={agent}",
        f"+actor_rollout_ref.rollout.custom.tree_dump_dir={folder / 'trees'}",
        "trainer.v1.trainer_mode=tree_sync",
        "+ray_kwargs.ray_init.num_gpus=1",
        "trainer.n_gpus_per_node=1",
    ]


def job_environment(*paths: Path | str, **variables: str) -> dict[str, str]:
    """Of a job of a test: paths of modules and variables that win over those of this process."""
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    usual = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    return os.environ | usual | variables


def run_main_ppo(
    folder: Path, overrides: Sequence[str], *, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run verl's stock `main_ppo` in a folder; the test fails with the end of the log if it does."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    finished = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds)
    log = finished.stdout + finished.stderr
    (folder / "log.txt").write_text(log)
    assert finished.returncode == 0, log[-6000:]
    return finished


def read_metrics(log: str) -> list[dict[str, float]]:
    """The console's figures of every step."""
    number = re.compile(r"([^:]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)\)?")
    lines = (found[0].split(" - ") for found in re.finditer(r"\bstep:\d+ - .*", log))
    steps = ([number.fullmatch(field.strip()) for field in fields] for fields in lines)
    return [{field[1]: float(field[2]) for field in step if field} for step in steps]
