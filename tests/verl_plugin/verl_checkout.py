"""What tree_rl calls, replaces and reads of verl, as tables that a test holds against the installed verl.

    python tests/verl_plugin/verl_checkout.py /path/to/verl     # the folder that holds the package verl

This command holds them against a checkout of verl that is only read: no import, no installation. It prints what is
missing or changed there, one line each. verl's classes may inherit, and its modules may import, what we name; both are
followed.
"""

import ast
import inspect
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.agent_loops import prompt_forests, tree_router
from tree_rl.verl_plugin.engine import engine
from tree_rl.verl_plugin.sft import sft_trainer
from tree_rl.verl_plugin.trainer import trainers, tree_trainer, workers

CALLED = """
EngineRegistry.register(model_type, backend, device, vendor)
FSDPEngineWithLMHead.forward_step(micro_batch, loss_function, forward_only)
FSDPEngineWithLMHead.get_data_parallel_group()
FSDPEngineWithLMHead.get_data_parallel_rank()
FSDPEngineWithLMHead.get_data_parallel_size()
Metric.__init__(aggregation, value)
Metric.aggregate()
Metric.aggregate_dp(metric_lists)
Metric.extend(values)
PrecisionType.to_dtype(precision)
KVBatchMeta.reorder(indexes)
KVBatchMeta.select_keys(keys_to_select)
TrainingWorker.set_loss_fn(loss_fn)
AgentLoopWorkerTQ._run_agent_loop(sampling_params, trajectory, agent_name, trace, kwargs)
append_to_dict(data, new_data, prefix)
apply_greedy_sampling_params(params)
apply_kl_penalty(data, kl_ctrl, kl_penalty)
compute_advantage(data, adv_estimator, gamma, lam, num_repeat, norm_adv_by_std_in_grpo, config)
PPOTrainer._add_batch_to_generate()
compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config)
destroy_global_process_group()
get_adv_estimator_fn(name_or_enum)
get_device_id()
get_device_name()
get_init_weight_context_manager(use_meta_tensor, mesh)
initialize_global_process_group(timeout_second)
log_seqlen_unbalance(seqlen_list, partitions, prefix)
masked_whiten(values, mask, shift_mean)
need_critic(config)
omega_conf_to_dataclass(config, dataclass_type)
ppo_loss(config, model_output, data, dp_group)
response_from_nested(tensor, response_mask)
response_to_nested(tensor, response_mask)
sft_loss(config, model_output, data, dp_group)
upsample_batch_to_divisible_size(batch, batch_multiple, eos_token_id)
value_loss(config, model_output, data, dp_group)
constants_ppo.get_ppo_ray_runtime_env(config)
tensordict_utils.assign_non_tensor(tensor_dict, kwargs)
tensordict_utils.assign_non_tensor_stack(tensor_dict, key, val)
tensordict_utils.get(tensordict, key, default)
tensordict_utils.get_non_tensor_data(data, key, default)
tensordict_utils.get_tensordict(tensor_dict, non_tensor_dict)
tensordict_utils.index_select_tensor_dict(batch, indices)
tensordict_utils.nested_tensor_from_tensor_list(tensors, ragged_idx)
tensordict_utils.pop(tensordict, key, default)
tensordict_utils.unwrap_non_tensor_data(data)
torch_functional.entropy_from_logits(logits)
transfer_queue.async_kv_batch_put(keys, partition_id, fields, tags, data_parser)
transfer_queue.async_kv_put(key, partition_id, fields, tag, data_parser)
transfer_queue.kv_batch_get(keys, partition_id, select_fields)
transfer_queue.kv_clear(keys, partition_id)
transfer_queue.kv_batch_put(keys, partition_id, fields, tags, data_parser)
""".strip().splitlines()
"""Functions and methods that we call, with all their parameters."""

OVERRIDDEN: dict[type, tuple[str, str]] = {
    engine.TreeFSDPEngineWithLMHead: (
        "FSDPEngineWithLMHead",
        """__init__ forward_backward_batch prepare_model_outputs initialize disable_adapter optimizer_step
        load_checkpoint save_checkpoint _init_device_mesh _build_module _build_fsdp_module get_per_tensor_param
        _gradient_sync_context""",
    ),
    workers.TreeTrainingWorker: ("TrainingWorker", "__init__ train_mini_batch"),
    sft_trainer.SFTWorker: ("TrainingWorker", "train_batch"),
    sft_trainer.TreeSFTTrainer: ("SFTTrainer", "_build_dataset _build_engine _build_dataloader"),
    workers.TreeActorRolloutRefWorker: ("ActorRolloutRefWorker", "__init__ compute_log_prob compute_ref_log_prob"),
    workers.TreeDetachActorWorker: ("DetachActorWorker", "restore_model_from_cpu"),
    tree_trainer.TreeTrainerMixin: (
        "PPOTrainer",
        """__init__ _init_resource_pool_mgr fit _balance_batch _compute_old_log_prob _compute_ref_log_prob
        _compute_values _compute_advantage _update_critic _update_actor _compute_metrics _build_replay_buffer
        _fetch_one_gen_batch _step_once _save_checkpoint _load_checkpoint""",
    ),
    trainers.PPOTrainerTreeSync: ("PPOTrainer", "prepare_step"),
    prompt_forests.TreeAgentLoopWorker: (
        "AgentLoopWorkerTQ",
        "_run_prompt _agent_loop_postprocess _compute_multi_modal_inputs",
    ),
    tree_router.TreeRouter: ("GlobalRequestLoadBalancer", "acquire_server clear_sticky_cache"),
}
"""Hooks of verl that we replace, with the class that has them: renamed there, ours would silently never run."""

ATTRIBUTES: dict[str, str] = {
    "FSDPEngineWithLMHead": """
        _autocast_dtype _is_offload_optimizer _is_offload_param device_mesh engine_config model_config module scaler
        ulysses_parallel_group ulysses_sequence_parallel_size
    """,
    "PPOTrainer": """
        actor_rollout_wg critic_wg config global_steps kl_ctrl_in_reward local_trigger_step
        parameter_sync_step ref_in_actor ref_policy_wg role_worker_mapping steps_per_epoch tokenizer
        total_training_steps use_critic use_reference_policy
    """,
    "SFTTrainer": """
        checkpoint_config collate_fn config engine engine_config loss_fn model_config optimizer_config profiler_config
        train_batch_size_per_dp train_dataloader train_dataset train_sampler training_client val_dataloader val_dataset
    """,
    "AgentLoopWorkerTQ": "config llm_client",
    "AgentLoopManagerTQ": "agent_loop_workers_class",
    "GlobalRequestLoadBalancer": "_inflight_requests _request_id_to_server",
}
"""Attributes that verl's instances have and ours read or replace."""


def parameters(function: Any) -> list[str]:
    # Ray adds a tracing parameter to the methods of an actor class.
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_ray")]


def overridden() -> list[str]:
    """The hooks with the parameters of ours, which must be verl's."""
    hooks = ((ours, owner, name) for ours, (owner, names) in OVERRIDDEN.items() for name in names.split())
    return [f"{owner}.{name}({', '.join(parameters(getattr(ours, name)))})" for ours, owner, name in hooks]


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
OTHER = ast.Pass()
"""What a name is bound to if neither a function nor a class."""


class Checkout:
    """The package verl in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019 # a checkout lives as long as the process
    def names(self, module: str) -> dict[str, ast.AST] | None:
        """What a module binds, in branches too; None if there is no such module."""
        path = self.folder.joinpath(*module.split("."))
        files = [path / "__init__.py", path.with_suffix(".py")]
        file = next((one for one in files if one.is_file()), None)
        if file is None:
            return {} if path.is_dir() else None
        found: dict[str, ast.AST] = {}
        left: list[ast.AST] = list(ast.parse(file.read_text()).body)
        for node in left:
            if isinstance(node, Definition):
                found[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                node.module = resolve_name("." * node.level + (node.module or ""), package)
                found |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.asname or alias.name.split(".")[0]: OTHER for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {one.id: OTHER for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                left += ast.iter_child_nodes(node)
        return found

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The module that defines a name, and the definition; None if the name is unbound."""
        names = self.names(module)
        if names is None or name not in names:
            return (module, OTHER) if self.names(f"{module}.{name}") is not None else None
        node = names[name]
        if not isinstance(node, ast.ImportFrom):
            return module, node
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if not str(node.module).startswith("verl"):
            return module, OTHER
        return self.find(str(node.module), original)

    def member(self, module: str, owner: ast.AST, name: str) -> ast.AST | None:
        """A member of a class or of its bases; None if there is none."""
        if not isinstance(owner, ast.ClassDef):
            return OTHER
        for node in owner.body:
            if isinstance(node, Definition) and node.name == name:
                return node
        for base in owner.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            member = self.member(*found, name) if found is not None else None
            if member is not None:
                return member
        return None

    def broken_name(self, module: str, name: str) -> str | None:
        """A line if a module does not bind a name."""
        if self.names(module) is None:
            return f"no module {module}{name and ', for '}{name}"
        return None if not name or self.find(module, name) else f"no {name} in {module}"

    def broken_call(self, call: str) -> str | None:
        """A line if a function or method, "owner.method(a, b)", is missing or has other parameters."""
        path, wanted = call.removesuffix(")").split("(")
        owner, *rest = path.split(".")
        module = compat.PRIVATE_NAMES.get(owner) or compat.PRIVATE_MODULES[owner]
        if not module.startswith("verl"):
            return None
        found = self.find(module, owner) if owner in compat.PRIVATE_NAMES else self.find(module, rest[0])
        if found is None:
            return f"no {path} in {module}"
        where, node = found
        member = self.member(where, node, rest[0]) if owner in compat.PRIVATE_NAMES and rest else node
        if member is None:
            return f"no {path} in {where}"
        if not isinstance(member, FUNCTION):
            return None
        given = ", ".join(_parameters(member))
        return None if given == wanted else f"{path}({given}), here ({wanted})"


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [one.arg for one in names if one is not None and one.arg not in ("self", "cls")]


def broken(folder: Path, calls: list[str]) -> list[str]:
    """What tree_rl needs and a checkout lacks, one line each; a call is written "owner.method(a, b)"."""
    checkout = Checkout(folder)
    names = [*compat.PRIVATE_NAMES.items(), *(("", module) for module in compat.PRIVATE_MODULES.values())]
    lines = [checkout.broken_name(module, name) for name, module in names if module.startswith("verl")]
    return sorted({line for line in (*lines, *map(checkout.broken_call, calls)) if line})


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]), [*CALLED, *overridden()])
    print(*found, f"{len(found)} of verl's names and signatures break", sep="\n")
    sys.exit(bool(found))
