"""The table of refusals, which launcher, trainer and engine check, so that no setting is silently ignored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.option_types import in_words
from tree_rl.training.tree_options import AUTO
from tree_rl.verl_plugin.compat import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, Tracking
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.options import ENGINES, RECORDED, REPLAY_KEY, REPLAYS, ROUTES
from tree_rl.verl_plugin.refusals import conditions as when
from tree_rl.verl_plugin.refusals import this_machine as here
from tree_rl.verl_plugin.refusals.conditions import CORRECTION, NEEDS_SUM_PI_SQUARED, ROLLOUT
from tree_rl.verl_plugin.refusals.older_keys import NOW_OF_REWARD, is_read_elsewhere
from tree_rl.verl_plugin.refusals.refusal import Of, Refusal, UnsupportedFeatureError, option
from tree_rl.verl_plugin.refusals.separate_rollouts import in_separate, is_no_product

TRAINER_MODES = {f"tree_{mode}": mode for mode in ("sync", "colocate_async", "separate_async")}
CHOICES = {
    "actor_rollout_ref.model.model_type": ("tree_language_model", "language_model"),
    "model.model_type": ("tree_language_model", "language_model"),
    "critic.model.model_type": ("tree_value_model", "value_model"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.v1.trainer_mode": (*TRAINER_MODES, *TRAINER_MODES.values()),
    **{
        f"{role}optim.{name}": ("constant", "cosine")
        for role in ("actor_rollout_ref.actor.", "critic.", "")
        for name in ("lr_scheduler_type", "warmup_style")
    },
}
"""All values of a config key in a job on trees."""
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
KNOWN: dict[str, Callable[[], Sequence[str]]] = {
    f"{ROLLOUT}.name": lambda: ("hf", "vllm", "sglang", "trtllm"),
    f"{ROLLOUT}.dtype": lambda: ("bfloat16", "float16", "float32", "half", "float", "auto"),
    f"{ENGINES[0]}.model_dtype": lambda: ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"),
    "actor_rollout_ref.actor.loss_agg_mode": lambda: (
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    ),
    # With a plus, the gradient is that of k2.
    **{
        key: lambda: (*KL, *(f"{name}+" for name in KL))
        for key in ("actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_penalty")
    },
    f"{ROLLOUT}.mode": lambda: ("async",),
    "data.truncation": lambda: ("error", "left", "right", "middle"),
    "global_profiler.tool": lambda: ("nsys", "npu", "torch", "torch_memory", "precision_debugger"),
    "trainer.device": lambda: ("cpu", "cuda", "npu"),
    "algorithm.adv_estimator": lambda: tuple(map(str, ADV_ESTIMATOR_REGISTRY)),
    "actor_rollout_ref.actor.policy_loss.loss_mode": lambda: tuple(POLICY_LOSS_REGISTRY),
    "trainer.logger": lambda: (*Tracking.supported_backend, "tracking"),
    **{
        f"actor_rollout_ref.actor.checkpoint.{name}_contents": lambda: ("model", "optimizer", "extra", "hf_model")
        for name in ("save", "load")
    },
}
"""Values of a config key in verl 0.9.1. Another plugin may add values, so only probable typing errors are refused."""
COUNTS = (
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
    *("data.max_token_len_per_gpu", *(f"actor_rollout_ref.actor.ppo_{name}" for name in ("mini_batch_size", "epochs"))),
    *(f"{ROLLOUT}.n", f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.tensor_model_parallel_size"),
    *(f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length"),
    *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs"),
    *(f"{ROLLOUT}.agent.num_workers", "reward.num_workers"),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
)
COUNTS_OR_NULL = (
    *("trainer.total_training_steps", "data.max_length", "data.gen_batch_size"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
)
FILES = (
    *("data.train_files", "data.val_files", "data.custom_cls.path"),
    "reward.custom_reward_function.path",
    *(f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.function_tool_path"),
    # By default these equal the rollout's.
    *("data.tool_config_path", "data.function_tool_path"),
    *(f"{ROLLOUT}.agent.agent_loop_config_path", "actor_rollout_ref.model.lora_adapter_path"),
)
FOLDERS = (
    *("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    f"{ROLLOUT}.custom.tree_dump_dir",
)
"""Folders that a job writes."""
TYPES: dict[str, Any] = {
    **dict.fromkeys((*FILES, "critic.model.path"), str | list | None),
    **dict.fromkeys(FOLDERS, str | None),
    **dict.fromkeys(("trainer.default_local_dir", "trainer.resume_mode"), str),
    **dict.fromkeys(("model.path", "actor_rollout_ref.model.path"), str),
    "data.train_files": str | list,
    **{f"data.{name}": int for name in ("train_max_samples", "val_max_samples", "dataloader_num_workers")},
    **dict.fromkeys(("data.num_workers", "trainer.critic_warmup"), int),
    **dict.fromkeys(("model.lora_rank", "actor_rollout_ref.model.lora_rank"), int),
    **{f"trainer.max_{name}ckpt_to_keep": int | None for name in ("", "actor_", "critic_")},
    "data.val_batch_size": int | None,
    **dict.fromkeys(("data.apply_chat_template_kwargs", "algorithm.credit"), Mapping | None),
    **{f"{ROLLOUT}.custom{name}": Mapping | None for name in ("", ".gateway_agent", ".tree_agent")},
}
"""Types of values of which verl would find out later."""
UNSHARDED = "{model} (tie_word_embeddings={tied}), which verl's FSDP engine cannot shard"
LEAVE_OUT = "set {place}.exclude_modules='.*(embed_tokens|lm_head)', or load an adapter without it"
TEXT = "trees run rows of text; drop it, or set model_type=language_model"
COUNT = "{key}={value}: expected a whole number of at least 1"
DIVISOR = "{key}={value} on {ranks} ranks: expected a divisor of their number"

# fmt: off
TABLE: dict[Of, tuple[Refusal, ...]] = {
    Of.VALUES: (
        *(Refusal(key, "{key}={value}: expected one of {choices}{hint}", "", when.no_choice(choices))
          for key, choices in CHOICES.items()),
        Refusal("tree", "tree.{name}: only python -m tree_rl.train and tree_rl.sft take short forms",
                f"write it as ++{ENGINES[0]}.tree.{{name}}", lambda tree, _: tree and {"name": next(iter(tree))}),
        *(Refusal(key, "{key}={value}: no such choice{hint}", "", when.near_miss(known))
          for key, known in KNOWN.items()),
        *(Refusal(key, f"{{key}}={{value}}: expected {in_words(kind)}", "", when.of_another_type(kind))
          for key, kind in TYPES.items()),
        *(Refusal(key, COUNT, "", lambda value, _: not when.is_count(value)) for key in COUNTS),
        *(Refusal(key, f"{COUNT}, or null", "", lambda value, _: value is not None and not when.is_count(value))
          for key in COUNTS_OR_NULL),
        *(Refusal(f"{ROLLOUT}.{name}", "{key}={value}: expected a number above 0 and at most 1", "", when.no_share)
          for name in ("gpu_memory_utilization", "top_p")),
        *(Refusal(key, "{key}={value}: expected a number of at least 0", "", when.not_a_rate)
          for key in ("actor_rollout_ref.actor.optim.lr", "critic.optim.lr", "optim.lr")),
    ),
    Of.FILES: (
        *(Refusal(key, "{key}={value}: no such file on this machine", "", here.missing_file) for key in FILES),
        *(Refusal(key, "{key}={value}: {there} is no folder that can be written", "choose another",
                  here.unwritable_folder) for key in FOLDERS),
        *(Refusal(f"{key}.path", "{key}={value}: {reason}", "{remedy}", here.lacks_name(f"{key}.name"))
          for key in ("reward.custom_reward_function", "data.custom_cls")),
    ),
    Of.SFT: (
        *(Refusal(f"trainer.{name}_freq", "{key}={value}: expected a number of steps, after_each_epoch or -1 (never)",
                  "", when.no_interval) for name in ("save", "test")),
        Refusal("data.pad_mode", "{option}: trees take rows without padding", "set it to no_padding",
                lambda mode, config: (mode != "no_padding"
                                      and option(config, "model.model_type") != "language_model")),
        Refusal("data.truncation", "{key}={value}: expected error, left or right", "",
                lambda value, config: (value not in ("error", "left", "right")
                                       and option(config, "data.custom_cls.path") is None)),
        *(Refusal(key, "{key}={value}: expected a whole number of at least 0", "", lambda value, _: value < 0)
          for key in ("data.num_workers", "trainer.seed")),
        Refusal("trainer.resume_from_path", "{key}={value}: expected an existing folder named global_step_N",
                "correct it, or set it to null and trainer.resume_mode=auto", here.no_checkpoint_of_sft),
        Refusal("trainer.test_freq", "{key}={value}, but data.val_files={files}: verl would end at the first test",
                "set it to -1, or name files", when.tests_nothing),
        Refusal("optim", "{key}: {reason}", "", here.no_optimizer),
    ),
    Of.MODEL_FILES: (
        *(Refusal(key, "{key}={value}: no such folder on this machine",
                  "correct it, or first hf download a hub's model", here.missing_folder)
          for key in ("path", "tokenizer_path")),
        Refusal("path", "{key}={value}: the folder has no {what}", "save the model there with save_pretrained",
                here.incomplete_model),
        Refusal("tokenizer_path", "{key}={value}: the folder has no {what}",
                "save the tokenizer there with save_pretrained", here.incomplete_tokenizer),
        *(Refusal(key, "{key}={value}: its {file} is damaged: {reason}", "copy or download it again", condition)
          for key, condition in (("path", here.damaged_model), ("tokenizer_path", here.damaged_tokenizer))),
        Refusal("path", f"{{key}}: verl imports {here.VALUE_HEAD} to build a model, and {{trl}} no longer has it",
                "pip uninstall trl", here.trl_without_value_head),
    ),
    Of.MACHINE: (
        Refusal(f"{ROLLOUT}.name", "{key}={value}: {module} is not installed here",
                f"{{command}}, or set {ROLLOUT}.name=hf on a machine without GPUs", here.absent_engine),
        Refusal(f"{ROLLOUT}.checkpoint_engine.backend", "{key}={value}: expected one of this machine's, {known}",
                f"name the module of another in {ROLLOUT}.checkpoint_engine.custom_backend_module; gloo's is "
                "tree_rl.verl_plugin.embedded_rollout.gloo_weights", here.absent_backend),
        Refusal("trainer.n_gpus_per_node", "{key}={value}{more}, but {found}",
                "correct one of them, or add machine=cpu to run without GPUs", here.too_few_gpus),
        Refusal("trainer.device", "{key}={value}, but verl runs on {platform}, as torch {torch} is built for it",
                "set VERL_PLATFORM=cpu in the environment", here.cpu_on_another_platform),
        Refusal("ray_kwargs.ray_init.num_cpus", "{key}={value}: verl would wait for {needed} processors, but "
                "Ray has {count}", "raise it, as Ray only counts them", here.too_few_cpus),
        Refusal("ray_kwargs.ray_init.runtime_env.py_executable", "{key}={value}: {reason}", "{remedy}",
                here.lacks_tree_rl),
        *(Refusal(f"{engine}.tree.attention", "{key}={value} cannot run here: {reason}", "set tree.attention=auto",
                  here.absent_tree_attention) for engine in ENGINES),
        *(Refusal(f"{role}.model.override_config.attn_implementation", "{key}={value}: {reason}",
                  "leave it out, as trees have their own attention", here.absent_row_attention)
          for role in ("actor_rollout_ref", "critic")),
        *(Refusal(f"{role}.optim", "{key}: {reason}", "", here.no_optimizer)
          for role in ("actor_rollout_ref.actor", "critic")),
        Refusal("trainer.logger", "{key}={value}: {reason}", "{remedy}, or set trainer.logger=[console]",
                here.unready_logger),
        Refusal("trainer.resume_from_path", "{key}={value}: expected an existing folder named global_step_N",
                "correct it, or set trainer.resume_mode=auto", here.no_checkpoint),
        Refusal("trainer.resume_mode", "{key}={value}: {folder} was saved by {saved} ranks, and this job has {ranks}",
                "start with as many, or convert it with verl.model_merger and name the result as the model's path",
                here.saved_by_other_ranks),
        *(Refusal(f"data.{name}_files", "{key}={value}: {reason}", "correct the file or the key", here.unusable_prompts)
          for name in ("train", "val")),
        Refusal("data.train_batch_size", "{key}={value}, but {held}", "lower it, or add prompts",
                here.larger_than_data),
        Refusal(f"{ROLLOUT}.agent.default_agent_loop", "{key}={value}: no such agent loop{hint}", "",
                here.unknown_loop),
        Refusal(f"{ROLLOUT}.agent.agent_loop_config_path", "{key}={value}: no module of {target} here",
                "correct it, or PYTHONPATH", here.loop_without_module),
    ),
    Of.JOB: (
        Refusal("trainer.use_v1", "{option}: verl's older trainer builds no trees", "set it to true",
                when.none_of(True)),
        *(Refusal(f"trainer.{name}_freq", "{key}={value}: expected a number of steps", "",
                  lambda steps, _: not when.is_number(steps)) for name in ("save", "test")),
        Refusal(f"{ROLLOUT}.temperature", "{option}: training divides logits by it",
                "expected a number above 0 (validation alone may draw greedily: "
                f"{ROLLOUT}.val_kwargs.temperature=0)", lambda heat, _: not (when.is_number(heat) and heat > 0)),
        Refusal(f"{ROLLOUT}.val_kwargs.temperature", "{option}: expected 0 (greedy) or a number above 0", "",
                lambda heat, _: not (when.is_number(heat) and heat >= 0)),
        *(Refusal(f"{ROLLOUT}.{name}_size", "{key}={value} on {ranks} GPUs: a rollout engine would have {size}",
                  "choose sizes whose product divides the number of GPUs", when.leaves_gpus)
          for name in when.PARALLEL),
        Refusal(f"{ROLLOUT}.checkpoint_engine.backend", "{option} with {key_of_rank}={rank}: verl 0.9.1 would send the "
                "rollout the base weights alone (verl #7495)", "set actor_rollout_ref.model.lora.merge=True",
                when.leaves_adapter_behind),
        Refusal(f"{ROLLOUT}.name", "{option} with {key_of_rank}={rank}, as it holds no separate adapter",
                "set actor_rollout_ref.model.lora.merge=True", when.holds_no_adapter),
        Refusal("actor_rollout_ref.actor.checkpoint.save_contents",
                "{key}: with actor_rollout_ref.model.lora_rank={rank} verl writes an hf_model that transformers cannot "
                "read", "leave hf_model out; python -m verl.model_merger merge writes model and adapter",
                when.exports_adapter),
        Refusal(f"{ROLLOUT}.log_prob_use_dynamic_bsz",
                "{key}={value} beside actor_rollout_ref.actor.use_dynamic_bsz={of_actor}, which verl's workers refuse",
                "set both to one value", when.differs_from_actor),
        Refusal("data.gen_batch_size", "{key}={value}: verl fetches as many prompts at a time, and no number of times "
                "makes data.train_batch_size={batch}", "choose a divisor, or leave it out", when.leaves_prompts),
        Refusal("data.train_batch_size", "{key}={value}: a step with separate rollouts is "
                "trainer.v1.separate_async.parameter_sync_step={updates} updates of "
                "actor_rollout_ref.actor.ppo_mini_batch_size={prompts} prompts", "set it to the product of both",
                in_separate(is_no_product)),
        *(Refusal(f"{ROLLOUT}.{name}", "{key}={value}: separate rollouts need GPUs besides the trainer's", "raise it",
                  in_separate(lambda number, _: number < 1)) for name in ("nnodes", "n_gpus_per_node")),
        Refusal(f"{ROLLOUT}.checkpoint_engine.backend", "{key}={value} does not reach separate rollouts",
                "set it to another, such as nccl", in_separate(lambda backend, _: backend == "naive")),
        Refusal("data.mm_processor_kwargs", "{key}.{bound}: transformers ignores one bound alone, vLLM does not",
                "set {key}.{other} too", when.bounds_pixels_on_one_side),
        Refusal("data.mm_processor_kwargs", "{key}.{name}: vLLM reads it in the model's folder alone",
                "set it in preprocessor_config.json there", when.normalises_apart_from_vllm),
        Refusal("reward.reward_manager.name", "{key}: {reason}", "", when.unknown_reward_manager),
        *(Refusal(key, "{key}.{name}={asked}: verl's V1 trainers do not read it", "set {now}={asked}",
                  is_read_elsewhere(key)) for key in NOW_OF_REWARD),
        Refusal("algorithm.use_pf_ppo",
                "{option}: verl's V1 trainers resample advantages and not the rows they belong to"),
        Refusal("algorithm.adv_estimator",
                "{option}: verl's V1 trainers roll out no greedy baseline (reward_baselines)",
                "choose another estimator, such as rloo", lambda name, _: str(name) == "remax"),
        Refusal("algorithm.adv_estimator", "{key}: {reason}", "", when.unusable_estimator),
        Refusal("algorithm.credit", "{key}: {reason}", "", when.unusable_options),
        *(Refusal(f"{engine}.tree", "{key}.custom_weights: {reason}", "", when.unusable_weights)
          for engine in (ENGINES[0], ENGINES[2])),
        Refusal("algorithm.norm_adv_by_std_in_grpo", "{key}={value}: adv_estimator={name} does not read it",
                "{remedy}", when.is_not_read_of_estimator),
        Refusal("algorithm.adv_estimator",
                f"{{option}} needs the actor's forward, which {CORRECTION}.bypass_mode=True skips", "set it to False",
                lambda name, config: (str(name) in NEEDS_SUM_PI_SQUARED
                                     and option(config, f"{CORRECTION}.bypass_mode"))),
        Refusal(f"{ROLLOUT}.agent.default_agent_loop",
                f"{{key}}={{value}} needs {ROLLOUT}.custom.gateway_agent.agent", "{remedy}", here.lacks_agent),
        Refusal(f"{ROLLOUT}.custom.gateway_agent.branching.policy",
                f"{{key}}={{value}} reads log-probs, which {ROLLOUT}.calculate_log_probs=False leaves out",
                "set it to True",
                lambda name, config: name == "entropy" and not option(config, f"{ROLLOUT}.calculate_log_probs")),
        Refusal(CORRECTION, "{key}.{name}={asked} compares with the rollout's log-probs, which "
                f"{ROLLOUT}.calculate_log_probs=False leaves out", "set it to True", when.corrects_without_log_probs),
        Refusal(CORRECTION, "{key}.{name}={asked} with {key}.bypass_mode=True is up to the loss, and "
                "policy_loss.loss_mode={loss_mode} ignores it",
                "set actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode and "
                "'+actor_rollout_ref.actor.policy_loss.rollout_correction=${{algorithm.rollout_correction}}'",
                when.leaves_correction_to_another_loss),
        Refusal(CORRECTION, "{key}: {reason}", "", when.unusable_correction),
    ),
    # Otherwise every batch would be refused for these, after the rollouts.
    Of.POLICY: (
        Refusal(f"{ROLLOUT}.enable_rollout_routing_replay",
                f"{{option}} beside actor_rollout_ref.actor.{REPLAY_KEY}=disabled, which ignores the routes",
                f"set actor_rollout_ref.actor.{REPLAY_KEY}=R3, or the first to False", when.records_in_vain),
    ),
    Of.VERLS_TRAINER: (
        Refusal(f"{ENGINES[0]}.tree.reuse_log_probs", "{option}: verl's own trainer finds old log-probs by a pass",
                f"set trainer.v1.trainer_mode=tree_sync, or the first to {AUTO}", lambda value, _: value is True),
    ),
    Of.CRITIC: (
        Refusal(f"critic.{SEQUENCE_PARALLEL}", "{option}: verl's critic does not read it",
                f"set critic.fsdp.{SEQUENCE_PARALLEL}",
                lambda size, config: size not in (1, option(config, f"critic.fsdp.{SEQUENCE_PARALLEL}", 1))),
        Refusal(f"critic.fsdp.{SEQUENCE_PARALLEL}",
                "{option} beside an actor's {of_actor}: both train the same mini-batches of as many ranks",
                "set them to one size", when.has_other_ranks),
        Refusal("critic.ppo_infer_max_token_len_per_gpu",
                "{option}: verl's V1 trainers train with it too, and critic.ppo_max_token_len_per_gpu={train}",
                "set one value", when.differs_from_training),
    ),
    Of.STRATEGY: (
        Refusal("strategy", "{option}: trees run on FSDP2", "set {place}.strategy=fsdp2", when.none_of("fsdp2")),
    ),
    # Settings that verl's V1 trainers and FSDP engine do not read, and copies of settings that an engine refuses.
    Of.ROLE: (
        Refusal("use_fused_kernels", "{option}: trees run without it"),
        Refusal("pad_to_length", "{option}: trees run without it"),
        Refusal("qat.enable", "{option}: trees run without it"),
        Refusal("use_prefix_grouper",
                "{option}: verl's V1 trainers do not read it, and trees share prefixes already"),
        Refusal("use_rollout_log_probs", "{option}: verl does not read it",
                f"set it to False and {CORRECTION}.bypass_mode=True"),
        Refusal("grad_clip", "{option}: verl's FSDP engine clips at optim.clip_grad={clips_at}",
                "set {place}.optim.clip_grad", when.clips_elsewhere),
        Refusal("checkpoint.async_save", "{option}: only Megatron saves in the background, and verl would not name "
                "the checkpoint to resume from"),
    ),
    Of.ACTOR: (
        Refusal("clip_ratio", "{option}: verl reads clip_ratio_low={low} and clip_ratio_high={high} instead",
                "set those", when.is_not_read_of_actor),
        Refusal("policy_loss.loss_mode", "{key}=dro without a {place}.policy_loss.dro_beta above 0", "set it",
                lambda mode, actor: mode == "dro" and not (option(actor, "policy_loss.dro_beta") or 0) > 0),
        Refusal(SEQUENCE_PARALLEL, "{option} with {place}.fsdp_config.tree.mode=flat, which would leave it to "
                "stock verl",
                "set tree.mode=tree, which runs rows that share nothing too, or model_type=language_model",
                lambda size, actor: size > 1 and when.is_flat(size, option(actor, "fsdp_config") or {})),
    ),
    Of.MODEL: (
        Refusal("use_liger", f"{{key}}={{value}}: expected true, false or {AUTO}", "",
                when.none_of(True, False, None, AUTO)),
        Refusal("use_fused_kernels", "{option}: the head of a tree computes log-probs without logits by itself"),
        Refusal("enable_activation_offload",
                "{option}: verl's hooks count the layers of one forward, and trees keep several alive",
                "set it to False and bound memory with fsdp_config.tree.max_tokens"),
        Refusal("lora_adapter_path",
                "{option} with {place}.lora_rank={rank}: verl's FSDP engine then loads no adapter",
                "set {place}.lora_rank to the adapter's rank", when.loads_no_adapter),
        Refusal("lora_adapter_path",
                f"{{option}}: its {when.ADAPTER_CONFIG} has {{drop}}, and branches would share one dropout mask",
                "set that to 0.0 there", when.drops_out),
        Refusal("lora.rank", "{option}: only Megatron reads it, and verl would take the actor without adapters for "
                "its own reference policy", "set {place}.lora_rank={value} and {place}.lora.rank=0"),
        *(Refusal(f"mtp.{name}", "{option}: verl's FSDP engine does not train multi-token prediction")
          for name in ("enable", "enable_train", "enable_rollout")),
    ),
    Of.CRITIC_MODEL: (
        Refusal("lora_rank", "{option} on a critic: verl's adapters fit models that generate", "set it to 0"),
    ),
    Of.ENGINE: (
        Refusal(SEQUENCE_PARALLEL, "{option} with {place}.tree.mode=flat, which would leave it to stock verl",
                "set tree.mode=tree, which runs rows that share nothing too, or model_type=language_model",
                lambda size, engine: size > 1 and when.is_flat(size, engine)),
        Refusal("pad_to_length", "{option}: a tree's forward has the length of its unique tokens"),
        Refusal("qat.enable", "{option}: quantized weights are not tested on trees"),
        Refusal("dtype", "{option}: verl's FSDP engine computes in mixed_precision.param_dtype={computed}",
                "set {place}.mixed_precision.param_dtype", when.computes_otherwise),
        Refusal("wrap_policy.min_num_params", "{option}: FSDP2 shards by layer", "unset it"),
        Refusal("wrap_policy.disable", "{option}: FSDP2 shards by layer", "unset it"),
        Refusal("router_replay.record_file", "{option}: verl reads and writes no such file", "unset it"),
        Refusal("router_replay.replay_file", "{option}: verl reads and writes no such file", "unset it"),
        Refusal("router_replay.mode", "{option} with tree.mode=flat (stock verl's FSDP engine does not replay)",
                "set tree.mode=tree", lambda _, engine: when.replays(_, engine) and when.is_flat(_, engine)),
        Refusal("router_replay.mode", "{option} on a reference policy, which would record its own routes",
                "set it to disabled", lambda mode, engine: mode == RECORDED and option(engine, "forward_only")),
    ),
    Of.CRITIC_ENGINE: (
        Refusal("router_replay.mode", "{option} on a critic: only the actor's routes are recorded",
                "set it to disabled", when.replays),
    ),
    Of.RANKS: (
        Refusal(SEQUENCE_PARALLEL, DIVISOR, "", when.leaves_ranks),
        Refusal("fsdp_size", f"{DIVISOR}, or -1 for all", "", when.leaves_shards),
    ),
    Of.CLUSTER: (
        Refusal("n_gpus_per_node", "{key}={value} on {nnodes} nodes, but Ray's nodes have {gpus} GPUs",
                "set it and {place}.nnodes to what they have", when.wait_for_gpus),
    ),
    Of.HEADS: (
        Refusal(SEQUENCE_PARALLEL, "the tree engine does not support {place}.{reason}", "", when.heads_do_not_divide),
    ),
    Of.PACKING: (
        Refusal("", "tree.mode=flat packs rows into one sequence, in which this model's rows would see each other "
                "(linear attention layers carry their state on; transformers builds the masks of gpt_oss and afmoe "
                "without positions, which only flash attention makes up for)",
                "use tree.mode=tree, which keeps rows apart also where they share nothing",
                lambda _, node: node["leaks"] and when.is_flat(_, node)),
    ),
    Of.GENERATION: (
        Refusal("", "rollout.name=hf runs attention layers alone, and this model has layers that carry a state",
                f"set {ROLLOUT}.name=vllm or sglang", lambda _, node: node["recurrent"] and node["name"] == "hf"),
    ),
    Of.ADAPTERS: (
        Refusal("", f"LoRA on the embedding in {UNSHARDED}", LEAVE_OUT, when.adapted("input", LoraLayer, tied=False)),
        Refusal("", f"LoRA on the head in {UNSHARDED}", LEAVE_OUT, when.adapted("output", LoraLayer, tied=False)),
        Refusal("", f"modules_to_save with the embedding in {UNSHARDED}",
                "load an adapter that names only the head there",
                when.adapted("input", ModulesToSaveWrapper, tied=False)),
        Refusal("", f"trainable_token_indices in {UNSHARDED}",
                "load an adapter without them, such as one with embed_tokens among target_modules",
                when.adapted("input", TrainableTokensWrapper, tied=True)),
        Refusal("", f"ensure_weight_tying of LoRA in {UNSHARDED}", "load an adapter without it", when.ties_by_hand),
        Refusal("", "LoRA on the routers of {model}, whose bias PEFT then hides (all-linear means them too)",
                "name other layers, as in {place}.target_modules='[q_proj,q_b_proj,kv_b_proj,o_proj]'",
                when.adapts_biased_router),
    ),
    Of.BATCH_OF_TEXT: (
        Refusal("", "row {row} carries multimodal inputs ({what})", TEXT, when.carries_media()),
        Refusal("", "row {row} carries position_ids of images (its {axes} axes differ)", TEXT,
                when.carries_positions_of_images),
    ),
    Of.BATCH_WITH_IMAGES: (
        Refusal("", "row {row} carries multimodal inputs besides images ({what})", TEXT,
                when.carries_media(*when.OF_IMAGES)),
        Refusal("", "row {row} has no image, but position_ids of images (its {axes} axes differ)", TEXT,
                when.carries_positions_of_images),
    ),
    Of.BATCH_WITHOUT_REPLAY: (
        Refusal("", f"{REPLAYS}=True, but {REPLAY_KEY}=disabled", f"set actor_rollout_ref.actor.{REPLAY_KEY}",
                lambda _, data: tu.get_non_tensor_data(data=data, key=REPLAYS, default=False)),
    ),
    Of.POLICY_WITHOUT_REPLAY: (
        Refusal("", f"rows carry {ROUTES}, which {REPLAY_KEY}=disabled ignores",
                f"set actor_rollout_ref.actor.{REPLAY_KEY}=R3 to repeat them, or "
                f"{ROLLOUT}.enable_rollout_routing_replay=False", lambda _, data: ROUTES in data),
    ),
    Of.UPDATE_WITH_REUSE: (
        Refusal("", "tree.reuse_log_probs=True, but the trainer has computed old_log_probs",
                "choose a tree trainer (trainer.v1.trainer_mode=tree_sync), or set it to auto",
                lambda _, data: "old_log_probs" in data),
    ),
}
# fmt: on
"""Rows about each subject, in the order in which they are checked."""


def refuse_if_unsupported(node: Any, place: str, *kinds: Of) -> None:
    """Raise the first refusal, an UnsupportedFeatureError, of a node that the kinds' texts in `Of` describe.

    `place` is the dotted key of the node in the config, empty for the whole config.
    """
    for kind in kinds:
        for row in TABLE[kind]:
            message = row.message(node, place)
            if message is not None:
                raise UnsupportedFeatureError(message)
