"""Conditions of the table of refusals: functions of a key's value and its node.

A condition returns False or None if the node may run, else True or the words for the message.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from omegaconf import ListConfig
from peft.tuners.lora.layer import ParamWrapper
from tensordict import TensorDict
from verl.protocol import DataProto

from tree_rl.credit import estimator_named
from tree_rl.credit.named import imported
from tree_rl.models.dropout import ADAPTER_CONFIG, dropout_settings
from tree_rl.models.language_model import TYPE_IDS
from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.models.sequence_parallel_support import check_sequence_parallel
from tree_rl.option_types import fits
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.did_you_mean import did_you_mean
from tree_rl.verl_plugin.options import DISABLED, ENGINES, as_tree_config, replay_mode
from tree_rl.verl_plugin.refusals.refusal import option

Words = dict[str, Any]
Condition = Callable[[Any, Any], Any]
ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
VERLS_GRAD_CLIP, VERLS_CLIP_RATIO, VERLS_DTYPE = 1.0, 0.2, "bfloat16"
"""Defaults of `grad_clip`, `clip_ratio` and `fsdp_config.dtype`."""
PARALLEL = ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
"""Ways in which a rollout engine spreads over GPUs."""
NEEDS_SUM_PI_SQUARED = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that read the policy's probabilities."""


# Any option.


def is_number(value: Any) -> bool:
    """True for a finite number that is no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """True for a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def not_a_rate(value: Any, _: Any) -> bool:
    """True for a value that is no number of at least 0. YAML, unlike Hydra, reads 1e-6 as text."""
    return not (is_number(value) and value >= 0)


def no_share(value: Any, _: Any) -> bool:
    """True for a value that is neither null nor a number above 0 and at most 1."""
    return value is not None and not (is_number(value) and 0 < value <= 1)


def none_of(*choices: Any) -> Condition:
    """A condition that holds for any value but the choices."""
    return lambda value, _: value not in choices


def of_another_type(kind: Any) -> Condition:
    """A condition that holds for values without the type of an annotation."""
    return lambda value, _: not fits(value, kind)


def no_choice(choices: Sequence[str]) -> Condition:
    """A condition that holds for values that are neither null nor a choice."""

    def condition(value: Any, _: Any) -> Words | None:
        if value is None or value in choices:
            return None
        return {"choices": ", ".join(choices), "hint": did_you_mean(str(value), choices, cutoff=0.6)}

    return condition


def fails(attempt: Callable[[Any, Any], object]) -> Condition:
    """A condition that holds where an attempt with the value and its node raises a ValueError, the `reason`."""

    @wraps(attempt)
    def condition(value: Any, node: Any) -> Words | None:
        try:
            attempt(value, node)
        except ValueError as error:
            return {"reason": error}
        return None

    return condition


def near_miss(known: Callable[[], Sequence[str]]) -> Condition:
    """A condition that holds for a value, or an entry of a list, that is probably a mistyped choice.

    The user's `external_lib`, which verl imports later, may add choices.
    """

    def condition(value: Any, config: Any) -> Words | None:
        if option(config, "actor_rollout_ref.model.external_lib") is not None:
            return None
        hints = {entry: did_you_mean(entry, known(), cutoff=0.6) for entry in texts(value) if entry not in known()}
        return next(({"value": entry, "hint": hint} for entry, hint in hints.items() if hint), None)

    return condition


def texts(value: Any) -> Iterator[str]:
    """The texts of a value that is one text or a list of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | ListConfig):
        yield from (str(entry) for entry in value)


# The whole config.


def no_interval(steps: Any, _: Any) -> bool:
    """True for an interval of verl's SFT loop that it cannot divide steps by."""
    return steps != "after_each_epoch" and (not is_number(steps) or steps == 0)


def tests_nothing(steps: Any, config: Any) -> Words | None:
    """Tests at intervals without files, over which verl's SFT loop would iterate."""
    files = option(config, "data.val_files")
    return {"files": files} if not files and (isinstance(steps, str) or steps > 0) else None


def corrects_without_log_probs(correction: Any, config: Any) -> Words | None:
    """A correction of stale rollouts that verl's V1 trainers would skip silently."""
    correction = correction or {}
    asked = [name for name in ("rollout_is", "rollout_rs") if correction.get(name, None) is not None]
    asked += ["bypass_mode"] if correction.get("bypass_mode", False) else []
    if not asked or option(config, f"{ROLLOUT}.calculate_log_probs"):
        return None
    return {"name": asked[0], "asked": correction[asked[0]]}


@fails
def unusable_correction(correction: Any, _: Any) -> None:
    """A correction that verl refuses after the first rollouts; tried on one token."""
    one = torch.ones(1, 1)
    row = DataProto.from_single_dict({"old_log_probs": -one, "rollout_log_probs": -one, "response_mask": one})
    compat.compute_rollout_correction_and_add_to_batch(row, correction or {})


def leaves_correction_to_another_loss(correction: Any, config: Any) -> Words | None:
    """Bypass mode leaves a correction to a loss that is not chosen."""
    settings, correction = (("loss_type", "ppo_clip"), ("rollout_rs", None)), correction or {}
    changed = [name for name, default in settings if correction.get(name, default) != default]
    loss_mode = option(config, "actor_rollout_ref.actor.policy_loss.loss_mode")
    if not correction.get("bypass_mode", False) or not changed or loss_mode == "bypass_mode":
        return None
    return {"name": changed[0], "asked": correction[changed[0]], "loss_mode": loss_mode}


@fails
def unusable_estimator(name: Any, _: Any) -> None:
    """The dotted name of an estimator that cannot be imported."""
    estimator_named(str(name))


def unusable_weights(tree: Any, _: Any) -> Words | None:
    """The dotted name of a function of weights that cannot be imported or called, or no name."""
    name = option(tree or {}, "custom_weights")
    if not isinstance(name, str) or option(tree, "path_weighting") != "custom":
        return None
    try:
        is_usable = callable(imported(name)) if "." in name else bool(name)
    except ValueError as error:
        return {"reason": error}
    return None if is_usable else {"reason": f"{name!r} is no function of a CreditTree, nor an entry of the rows"}


def unusable_options(options: Any, config: Any) -> Words | None:
    """Options for an estimator that takes none, or not these."""
    name = str(option(config, "algorithm.adv_estimator"))
    estimator = estimator_named(name)
    if not options:
        return None
    if estimator is None:
        return {"reason": f"adv_estimator={name} takes no options; leave them out"}
    try:
        estimator.check_options(options)
    except (TypeError, ValueError) as error:
        return {"reason": f"adv_estimator={name}: {error}"}
    return None


def is_not_read_of_estimator(divides: Any, config: Any) -> Words | None:
    """verl's switch of GRPO's deviations turned off, which estimators on trees do not read."""
    name, own = str(option(config, "algorithm.adv_estimator")), option(config, "algorithm.credit.by_std")
    estimator = estimator_named(name)
    if divides or estimator is None or own is False:
        return None
    has_its_own = "by_std" in inspect.signature(estimator.credit).parameters
    return {"name": name, "remedy": "set +algorithm.credit.by_std=False" if has_its_own else "set it to True"}


def records_in_vain(records: Any, config: Any) -> bool:
    """True if the rollout records routes that the actor does not repeat."""
    return bool(records) and not replays(None, option(config, ENGINES[0]) or {})


def leaves_adapter_behind(backend: Any, config: Any) -> Words | None:
    """An adapter that is not merged, and a way to send weights that verl 0.9.1 gives the base weights only."""
    key = "actor_rollout_ref.model.lora"
    rank, merges = option(config, f"{key}_rank", 0), option(config, f"{key}.merge", False)
    return {"key_of_rank": f"{key}_rank", "rank": rank} if rank > 0 and backend != "naive" and not merges else None


def holds_no_adapter(name: Any, config: Any) -> Words | None:
    """An adapter that is not merged, and the embedded rollout engine."""
    return leaves_adapter_behind("apart", config) if name == "hf" else None


def exports_adapter(contents: Any, config: Any) -> Words | None:
    """A Hugging Face folder of a model with an adapter, whose layers verl names as peft does."""
    rank = option(config, "actor_rollout_ref.model.lora_rank", 0)
    return {"rank": rank} if rank > 0 and "hf_model" in texts(contents) else None


def differs_from_actor(value: Any, config: Any) -> Words | None:
    """A way to cut passes of the policy into micro-batches that is not its updates'."""
    of_actor = option(config, "actor_rollout_ref.actor.use_dynamic_bsz")
    return None if value == of_actor else {"of_actor": of_actor}


@fails
def unknown_reward_manager(name: Any, config: Any) -> None:
    """A reward manager that nothing registers; the user's reward function and `external_lib` may."""
    others = ("reward.custom_reward_function.path", "actor_rollout_ref.model.external_lib")
    is_registered = option(config, "reward.reward_manager.source") != "register"
    if not is_registered and not any(option(config, key) for key in others):
        compat.get_reward_manager_cls(name)


def leaves_prompts(fetched: Any, config: Any) -> Words | None:
    """A number of prompts of a fetch that does not divide a step's; verl sets it to 1 where it refills groups."""
    batch, refills = option(config, "data.train_batch_size"), option(config, "algorithm.filter_groups.enable")
    refills = refills or option(config, "trainer.v1.sampler.sync_refill_failed_groups")
    is_read = option(config, "trainer.v1.trainer_mode") == "sync" and not refills and bool(fetched)
    return {"batch": batch} if is_read and batch % fetched else None


def has_other_ranks(size: Any, config: Any) -> Words | None:
    """A critic with another number of ranks with rows than the actor, for whose ranks mini-batches are laid out."""
    in_role = option(config, f"actor_rollout_ref.actor.{SEQUENCE_PARALLEL}", 1)
    of_actor = in_role if in_role > 1 else option(config, f"{ENGINES[0]}.{SEQUENCE_PARALLEL}", 1)
    return None if size == of_actor else {"of_actor": of_actor}


def differs_from_training(budget: Any, config: Any) -> Words | None:
    """A critic's budget for inference that differs from its budget for training, which verl does not read."""
    train = option(config, "critic.ppo_max_token_len_per_gpu")
    return None if budget in (None, train) else {"train": train}


def leaves_gpus(size: Any, config: Any) -> Words | None:
    """Sizes of a rollout engine whose product does not divide the GPUs that sample; verl would wait for no engine."""
    sizes = [option(config, f"{ROLLOUT}.{name}_size", 1) for name in PARALLEL]
    place = ROLLOUT if option(config, "trainer.v1.trainer_mode") == "separate_async" else "trainer"
    ranks = option(config, f"{place}.n_gpus_per_node", 1) * option(config, f"{place}.nnodes", 1)
    is_wrong = size != 1 and all(map(is_count, sizes)) and ranks % math.prod(sizes)
    return {"ranks": ranks, "size": math.prod(sizes)} if is_wrong else None


# A role, its model and its engine.


def clips_elsewhere(grad_clip: Any, role: Any) -> Words | None:
    """A `grad_clip` that differs from the optimizer's, which verl reads instead."""
    clips_at = option(role, "optim.grad_clip") or option(role, "optim.clip_grad")
    return None if grad_clip in (None, VERLS_GRAD_CLIP, clips_at) else {"clips_at": clips_at}


def is_not_read_of_actor(ratio: Any, actor: Any) -> Words | None:
    """A `clip_ratio` that verl's losses do not read, because neither bound is null."""
    low, high = option(actor, "clip_ratio_low"), option(actor, "clip_ratio_high")
    is_read = None in (low, high) or ratio in (None, VERLS_CLIP_RATIO, low, high)
    return None if is_read else {"low": low, "high": high}


def loads_no_adapter(path: Any, model: Any) -> Words | None:
    """An adapter's path without a LoRA rank."""
    rank = option(model, "lora_rank", 0)
    return None if path is None or rank > 0 else {"rank": rank}


def drops_out(path: Any, _: Any) -> Words | None:
    """Dropout of an adapter on this machine; other adapters are checked when they are loaded."""
    file = None if path is None else Path(path, ADAPTER_CONFIG).expanduser()
    found = dropout_settings(json.loads(file.read_text())) if file is not None and file.is_file() else {}
    return {"drop": ", ".join(f"{name}={value}" for name, value in found.items())} if found else None


def computes_otherwise(dtype: Any, engine: Any) -> Words | None:
    """A dtype that differs from the one in which verl's FSDP engine computes."""
    computed, as_torch = str(option(engine, "mixed_precision.param_dtype", "bf16")), compat.PrecisionType.to_dtype
    is_same = dtype in (None, VERLS_DTYPE) or as_torch(dtype) == as_torch(computed)
    return None if is_same else {"computed": computed}


def is_flat(_: Any, engine: Any) -> bool:
    """True if the engine runs rows as stock verl does."""
    return as_tree_config(engine.get("tree", None)).mode == "flat"


def replays(_: Any, engine: Any) -> bool:
    """True if the engine records or repeats routes."""
    return replay_mode(engine) != DISABLED


def leaves_ranks(size: Any, sizes: Any) -> Words | None:
    """A size that does not divide the number of ranks, which verl would round."""
    return {"ranks": sizes["ranks"]} if not is_count(size) or sizes["ranks"] % size else None


def leaves_shards(size: Any, sizes: Any) -> Words | None:
    """A size of shards that does not divide the number of ranks; -1 and sizes that cover all ranks are valid."""
    return None if isinstance(size, int) and not 0 <= size < sizes["ranks"] else leaves_ranks(size, sizes)


def wait_for_gpus(per_node: Any, cluster: Any) -> Words | None:
    """Fewer groups of GPUs on Ray's nodes than a job asks for; verl compares totals and waits for the groups."""
    groups = sum(gpus // per_node for gpus in cluster["gpus"])
    found = ", ".join(map(str, cluster["gpus"]))
    return {"nnodes": cluster["nnodes"], "gpus": found} if groups < cluster["nnodes"] else None


# A built model.


@fails
def heads_do_not_divide(size: Any, node: Any) -> None:
    """A size of sequence parallelism that the model does not support."""
    check_sequence_parallel(node["config"], size)


def adapted(part: str, kind: type, *, tied: bool) -> Condition:
    """A condition for an adapter on the embedding ("input") or head ("output") of a model with (un)tied weights.

    verl 0.9.1 gives an untied embedding and head separate FSDP groups, but not an adapter inside them; without trees
    such runs end with an error of PyTorch.
    """

    def condition(_: Any, module: Any) -> Words | None:
        return _model(module, tied) if isinstance(getattr(module, f"get_{part}_embeddings")(), kind) else None

    return condition


def ties_by_hand(_: Any, module: Any) -> Words | None:
    """Weights tied by LoRA's `ensure_weight_tying`."""
    parts = [part for part in (module.get_input_embeddings(), module.get_output_embeddings()) if part is not None]
    is_whole = all(weight.is_contiguous() for part in parts for weight in part.parameters())
    return None if is_whole else _model(module, True)


def adapts_biased_router(_: Any, module: Any) -> Words | None:
    """A router behind an adapter that hides its bias from the layer that reads it: every forward of PEFT 0.21 fails."""
    wrappers = (part for part in module.modules() if isinstance(part, ParamWrapper))
    if any("e_score_correction_bias" in dict(one.get_base_layer().named_buffers(recurse=False)) for one in wrappers):
        return {"model": module.config.model_type}
    return None


def _model(module: Any, tied: bool) -> Words | None:
    is_tied = bool(getattr(module.config, "tie_word_embeddings", False))
    return {"model": module.config.model_type, "tied": tied} if is_tied == tied else None


# A batch.


def bounds_pixels_on_one_side(given: Any, _: Any) -> Words | None:
    """Smallest or largest number of pixels without the other."""
    bounds = ("min_pixels", "max_pixels")
    found = [name for name in bounds if (given or {}).get(name) is not None]
    return {"bound": found[0], "other": bounds[found[0] == bounds[0]]} if len(found) == 1 else None


def normalises_apart_from_vllm(given: Any, config: Any) -> Words | None:
    """An option of normalising pixels, which vLLM does on the device."""
    names = ("do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std")
    found = [name for name in names if (given or {}).get(name) is not None]
    return {"name": found[0]} if found and option(config, f"{ROLLOUT}.name") == "vllm" else None


OF_IMAGES = ("pixel_values", "image_grid_thw", "images_seqlens")
"""Keys of verl's `multi_modal_inputs` for a row with images, besides type ids."""


def carries_media(*readable: str) -> Condition:
    """A condition for multimodal inputs of a row, except those under the given keys.

    Type ids may mark tokens of a row with a readable image; those of other rows must mark every token as text.
    """

    def condition(_: Any, data: TensorDict) -> Words | None:
        for row, inputs in enumerate(data.get("multi_modal_inputs", ())):
            given = tu.unwrap_non_tensor_data(inputs) or {}
            most = int(bool(readable) and given.get("pixel_values") is not None)
            for key, value in given.items():
                if value is None or key in readable:
                    continue
                if key not in TYPE_IDS or (torch.as_tensor(value) > most).any():
                    return {"row": row, "what": key}
        return None

    return condition


def carries_positions_of_images(_: Any, data: TensorDict) -> Words | None:
    """Positions of a row without an image whose axes differ; rows of text have equal axes."""
    if "position_ids" in data and data["position_ids"].dim() == 3:
        inputs = list(data.get("multi_modal_inputs", ())) or [None] * len(data)
        for row, (position_AL, given) in enumerate(zip(data["position_ids"].unbind(), inputs, strict=True)):
            has_image = (tu.unwrap_non_tensor_data(given) or {}).get("pixel_values") is not None
            if not has_image and not (position_AL == position_AL[:1]).all():
                return {"row": row, "axes": len(position_AL)}
    return None
