"""Adapts verl's loss and verl's forward to the calls of a tree step: by outputs and indices of rows."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.training.context import StepContext
from tree_rl.training.loss.outputs import CANDIDATE_LOG_PROBS, ENTROPY, LOG_PROBS, EdgeOutputs, Metrics, PartsLoss
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.compat import tensordict_utils as tu

VerlLossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]

SEPARABLE_POLICY_LOSSES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gpg", "dro", "cispo", "sapo"})
"""verl's policy losses in which a token's gradient depends on no other token's log-prob."""
SEPARABLE_ON_POLICY_LOSSES = frozenset({"gspo", "geo_mean", "kl_cov"})
"""verl's policy losses that couple tokens only by their ratios, so that at a ratio of 1 they are separable."""

SEQUENCE_MEAN, SEQUENCE_NORM = "seq-mean", "seq-mean-token-sum-norm"
"""Prefix of the `loss_agg_mode`s that average over sequences, and the mode that also divides by a length."""
GEO_MEAN = "geo_mean"
"""verl's policy loss that divides by the rows of a micro-batch."""
SEQUENCE_POLICY_LOSSES = frozenset({"sapo", GEO_MEAN})
"""verl's policy losses that average over sequences under every `loss_agg_mode`."""

HOLDS_CELLS = "holds_cells"
"""Flag of a mini-batch of whole cells (what one rank trains in one optimizer step), whose `global_batch_size` is its
number of rows on all ranks."""
REUSE_LOG_PROBS = "reuse_log_probs"
"""Flag of an update that uses the log-probs of its own forward as old log-probs."""


@dataclass(frozen=True, slots=True)
class OnPolicyLoss:
    """verl's loss with the old log-probs of the same forward: the ratio is 1, but it has a gradient."""

    loss_function: VerlLossFunction
    """verl's loss."""
    sees_entropy: bool
    """True if verl requested the entropy. If False, it is hidden, so that the loss reports no entropy term."""

    def __call__(
        self, *, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss and metrics of some rows in the form of verl's losses."""
        seen = {name: value for name, value in model_output.items() if name != ENTROPY or self.sees_entropy}
        old = compat.response_from_nested(model_output[LOG_PROBS].detach(), data["response_mask"])
        rows = with_columns(data, {"old_log_probs": old})
        return self.loss_function(model_output=seen, data=rows, dp_group=dp_group)


def with_columns(rows: TensorDict, columns: Mapping[str, torch.Tensor]) -> TensorDict:
    """The rows with other columns beside or instead of theirs. `TensorDict.copy` would clone names and other objects
    one by one."""
    return TensorDict({**dict(rows.items()), **columns}, batch_size=rows.batch_size)


@dataclass(kw_only=True, slots=True)
class VerlCall:
    """One engine call in verl's terms: its rows, the loss over them, the forward without a tree."""

    data: TensorDict
    loss_function: VerlLossFunction | None
    """verl's loss; None in inference."""
    group: torch.distributed.ProcessGroup | None
    stock_step: Callable[..., tuple[torch.Tensor, dict[str, Any]]]
    """verl's `forward_step`: (data, loss, `forward_only`) -> (loss, verl's output dict)."""
    _selected: tuple[tuple[int, ...], TensorDict, bool] | None = field(init=False, default=None)
    _split: dict[str, tuple[torch.Tensor, ...]] = field(init=False, default_factory=dict)
    """Rows of each nested tensor, split when first read: that takes time in proportion to all rows of the call."""

    def loss(self, outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, dict[str, Any]]:
        """verl's loss of some rows; see `training.loss.outputs.Loss`."""
        assert self.loss_function is not None
        selected, trains = self._on_device(members)
        if _distils(self.loss_function) and not trains:
            # verl takes the least and the largest loss of a micro-batch, and padding rows have none.
            return torch.stack([output.sum() * 0 for output in outputs.present().values()]).sum(), {}
        holds_cells = tu.get_non_tensor_data(data=self.data, key=HOLDS_CELLS, default=False)
        if holds_cells and _loss_mode(self.loss_function) == GEO_MEAN:
            # The loss is proportional to the advantages, so scaling them scales the loss.
            share = len(members) * selected["dp_size"] / selected["global_batch_size"]
            selected = with_columns(selected, {"advantages": selected["advantages"] * share})
        model_output = as_model_output(outputs, selected["input_ids"].offsets())
        student = model_output.pop(CANDIDATE_LOG_PROBS, None)
        if student is not None:
            assert isinstance(self.loss_function, partial)
            config = self.loss_function.keywords["distillation_config"].distillation_loss
            model_output |= distillation_outputs(student, selected["teacher_logprobs"], config)
        value, metrics = self.loss_function(model_output=model_output, data=selected, dp_group=self.group)
        # Averages over no token are 0, and verl would average them with those of other micro-batches.
        return value, metrics if trains else {name: one for name, one in metrics.items() if _is_sum(one)}

    def run_flat(
        self, members: Sequence[int], loss: PartsLoss | None
    ) -> tuple[torch.Tensor, EdgeOutputs, list[Metrics]]:
        """Run some rows through verl's forward; see `training.context.FlatRows`."""
        reported: list[Metrics] = []

        def loss_for_verl(*, model_output: dict[str, torch.Tensor], **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            assert loss is not None
            value, metrics = loss(_unnested(model_output))
            reported.extend(metrics)
            return value, {}

        # verl expects no loss function in inference.
        loss_function = None if loss is None else loss_for_verl
        value, output = self.stock_step(self._select(members), loss_function, loss is None)
        return value, _unnested(output["model_output"]), reported

    def _on_device(self, members: Sequence[int]) -> tuple[TensorDict, bool]:
        """The rows on the device, and whether they train a token, read before the copy so that nothing waits for it.

        Caches the last ones, because a partitioned forest reads its rows repeatedly.
        """
        key = tuple(members)
        if self._selected is None or self._selected[0] != key:
            rows, device = self._select(members), compat.get_device_id()
            moved = {name: one.to(device) for name, one in rows.items() if isinstance(one, torch.Tensor)}
            self._selected = (key, with_columns(rows, moved), bool(rows["loss_mask"].values().any()))
        return self._selected[1:]

    def _select(self, members: Sequence[int]) -> TensorDict:
        """Some rows; does not copy tensors if these are all rows in order."""
        if list(members) == list(range(len(self.data))):
            return with_columns(self.data, {})
        nested = {name: one for name, one in self.data.items() if isinstance(one, torch.Tensor) and one.is_nested}
        selected = tu.index_select_tensor_dict(self.data.exclude(*nested), list(members))
        for name, tensor in nested.items():
            if name not in self._split:
                self._split[name] = tensor.unbind()
            rows = [self._split[name][member] for member in members]
            selected[name] = tu.nested_tensor_from_tensor_list(
                rows, ragged_idx=getattr(tensor, "_ragged_idx", tensor.dim() - 1)
            )
        return selected


def distillation_outputs(student: Any, teacher: Any, config: Any) -> dict[str, torch.Tensor]:
    """What verl's `compute_forward_kl_topk` finds in logits, from log-probs of the teacher's K tokens alone.

    Its diagnostics of the student's own likeliest tokens, for which verl's loss does not ask, are left out.

    Args:
        student: nested [B, L, K], log-probs under the model.
        teacher: the same under the teacher.
        config: verl's `DistillationLossConfig`.

    Returns:
        `distillation_losses`, `student_mass` and `teacher_mass`, nested [B, L].
    """
    student_FK, teacher_FK = student.values(), teacher.values()
    of_tokens = {"student_mass": student_FK.exp().sum(-1), "teacher_mass": teacher_FK.exp().sum(-1)}
    if config.log_prob_min_clamp is not None:
        student_FK, teacher_FK = (one.clamp_min(config.log_prob_min_clamp) for one in (student_FK, teacher_FK))
    of_tokens["distillation_losses"] = compat.kl_divergence(log_q=student_FK, log_p=teacher_FK)
    return {name: torch.nested.nested_tensor_from_jagged(one, student.offsets()) for name, one in of_tokens.items()}


def as_model_output(outputs: EdgeOutputs, offsets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs as verl's nested tensors over full rows."""
    return {
        name: torch.nested.nested_tensor_from_jagged(value, offsets.to(value.device))
        for name, value in outputs.present().items()
    }


def _unnested(model_output: dict[str, torch.Tensor]) -> EdgeOutputs:
    return EdgeOutputs.of({name: nested.values() for name, nested in model_output.items()})


def with_normalisers(
    loss_function: VerlLossFunction | None,
    data: TensorDict,
    group: torch.distributed.ProcessGroup,
    context: StepContext,
    *,
    trains: bool,
) -> VerlLossFunction | None:
    """Assign to `data` the row-based normalisers that verl's losses read; returns the loss to call. Collective.

    `seq-mean-token-sum-norm` without `loss_scale_factor` divides by the longest response of the step on all ranks
    instead of that of a micro-batch: the choice of micro-batches must not change the loss. `group`, verl's
    data-parallel group, has one rank of each sequence-parallel group, so all members hold different rows.
    """
    tokens = data["loss_mask"].values().sum().to(context.device)
    torch.distributed.all_reduce(tokens, group=group)
    dp_size = torch.distributed.get_world_size(group)
    sp_size = context.num_ranks // dp_size
    tu.assign_non_tensor(data, sp_size=sp_size, batch_num_tokens=tokens.item(), dp_size=dp_size)
    config = _config_of(loss_function) if trains else None
    if config is None or config.loss_agg_mode != SEQUENCE_NORM or config.loss_scale_factor is not None:
        return loss_function
    # Ranks without rows have no such column.
    longest = data["response_mask"].offsets().diff().max() if "response_mask" in data else torch.zeros(())
    longest = longest.to(compat.get_device_id(), torch.int64)
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX, group=group)
    config = copy.copy(config)
    # Through `vars`, because fields of verl's configs are frozen.
    vars(config)["loss_scale_factor"] = int(longest)
    assert isinstance(loss_function, partial)
    return partial(loss_function.func, *loss_function.args, **{**loss_function.keywords, "config": config})


def averages_sequences(loss_function: Any) -> bool:
    """True if verl's loss divides by the number of sequences."""
    config = _config_of(loss_function)
    if config is None:
        return False
    return _loss_mode(loss_function) in SEQUENCE_POLICY_LOSSES or config.loss_agg_mode.startswith(SEQUENCE_MEAN)


def _is_sum(metric: Any) -> bool:
    return isinstance(metric, compat.Metric) and metric.aggregation == compat.AggregationType.SUM


def _distils(loss_function: Any) -> bool:
    return isinstance(loss_function, partial) and loss_function.func is compat.distillation_ppo_loss


def _unwrapped(loss_function: Any) -> Any:
    """verl's loss without our wrapper."""
    return loss_function.loss_function if isinstance(loss_function, OnPolicyLoss) else loss_function


def _config_of(loss_function: Any) -> Any:
    """The config of the role to which one of verl's losses is bound; None for other losses."""
    loss_function = _unwrapped(loss_function)
    config = loss_function.keywords.get("config") if isinstance(loss_function, partial) else None
    return config if hasattr(config, "loss_agg_mode") else None


def _loss_mode(loss_function: Any) -> str | None:
    """The name of verl's policy loss; None for other losses."""
    config = _config_of(loss_function)
    is_policy = config is not None and hasattr(config, "policy_loss")
    return str(config.policy_loss.get("loss_mode", "vanilla")) if is_policy else None


def couples_log_probs_alone(loss_function: Any) -> bool:
    """True for verl's loss of the actor, in which entropies add up token by token."""
    loss_function = _unwrapped(loss_function)
    return isinstance(loss_function, partial) and loss_function.func is compat.ppo_loss


def is_token_separable(loss_function: Any) -> bool:
    """True if dL/dlog-prob of a token depends only on that token's log-prob; False for unknown losses."""
    separable_losses = SEPARABLE_POLICY_LOSSES
    if isinstance(loss_function, OnPolicyLoss):
        loss_function, separable_losses = loss_function.loss_function, separable_losses | SEPARABLE_ON_POLICY_LOSSES
    if not isinstance(loss_function, partial):
        return False
    if _distils(loss_function):
        # Losses of distillation read one position each, and verl's policy gradient on them is vanilla.
        distils = loss_function.keywords["distillation_config"].distillation_loss
        return not distils.use_task_rewards or _loss_mode(loss_function) in separable_losses
    if loss_function.func is compat.ppo_loss:
        return _loss_mode(loss_function) in separable_losses
    return loss_function.func in (compat.sft_loss, compat.value_loss)
