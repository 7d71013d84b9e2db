"""verl's FSDP2 engine with the forward over trees: rows stay verl's, the tree is an execution plan inside the engine.

Every unique token runs once; log-probs, entropies and values are scattered back to the rows, and verl's own loss
functions, metrics, checkpoints and weight sync follow unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.training.edges import plan_edges
from tree_rl.training.readout import ENTROPY, LOG_PROBS, SUM_PI_SQUARED, EdgeReadout, Readout, ValueReadout
from tree_rl.training.tree_step import TreeInputs, tree_log_probs, tree_values
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import PartitionPlan
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.compat import EngineRegistry, FSDPEngineWithValueHead, get_device_id
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.rows import Rows
from tree_rl.verl_plugin.engine.run import TreeRunningEngine

LANGUAGE_MODEL = "tree_language_model"
VALUE_MODEL = "tree_value_model"
DEVICES = ["cpu", "cuda"]


@EngineRegistry.register(model_type=LANGUAGE_MODEL, backend=["fsdp2"], device=DEVICES)
class TreeFSDPEngineWithLMHead(TreeRunningEngine):
    """Actor, reference policy and SFT: log-probs and entropies of trained edges, each computed once."""

    stock_model_type = "language_model"

    def tree_forward(
        self, selected: TensorDict, rows: Rows, members: list[int], forest: Forest, inputs: TreeInputs
    ) -> dict[str, torch.Tensor]:
        """Log-probs (and entropy, sum of squared probabilities where asked for) of the rows, nested."""
        wanted_F = rows.wanted_F[rows.flat_positions(members)]
        device = get_device_id()
        names = wanted_outputs(selected)
        flat = tree_log_probs(
            self.module,
            inputs,
            partial(plan_edges, forest, wanted_F, rows.temperature_B[members], device),
            entropy=ENTROPY in names,
            sum_pi_squared=SUM_PI_SQUARED in names,
        )
        output = {
            "log_probs": flat.log_probs_F,
            "entropy": flat.entropy_F,
            "sum_pi_squared": flat.sum_pi_squared_F,
        }
        return {key: self.nested(value, selected) for key, value in output.items() if value is not None}

    def readout(
        self, selected: TensorDict, rows: Rows, members: list[int], forest: Forest, plan: PartitionPlan
    ) -> Readout:
        """What the loss reads from a partitioned forest: log-probs of wanted edges."""
        device = torch.device(get_device_id())
        wanted_F = rows.wanted_F[rows.flat_positions(members)]
        edges = plan_edges(forest, wanted_F, rows.temperature_B[members], device)
        return EdgeReadout(plan, edges, names=wanted_outputs(selected), device=device)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """verl's reference policy under LoRA; the log-probs that it finds are not those of the policy that trains."""
        with super().disable_adapter():
            yield
        self.forget()


def wanted_outputs(selected: TensorDict) -> tuple[str, ...]:
    """Names of the outputs that verl asks a language model for."""
    flags = {"calculate_entropy": ENTROPY, "calculate_sum_pi_squared": SUM_PI_SQUARED}
    asked = [name for flag, name in flags.items() if tu.get_non_tensor_data(data=selected, key=flag, default=False)]
    return (LOG_PROBS, *asked)


@EngineRegistry.register(model_type=VALUE_MODEL, backend=["fsdp2"], device=DEVICES)
class TreeFSDPEngineWithValueHead(TreeFSDPEngineWithLMHead, FSDPEngineWithValueHead):
    """Critic: the value of every unique token, computed once."""

    stock_model_type = "value_model"

    def tree_forward(
        self, selected: TensorDict, rows: Rows, members: list[int], forest: Forest, inputs: TreeInputs
    ) -> dict[str, torch.Tensor]:
        """Values of the rows, nested."""
        return {"values": self.nested(tree_values(self.module, forest, inputs), selected)}

    def readout(
        self, selected: TensorDict, rows: Rows, members: list[int], forest: Forest, plan: PartitionPlan
    ) -> Readout:
        """What the loss reads from a partitioned forest: values of all its tokens."""
        return ValueReadout(forest, plan, device=torch.device(get_device_id()))


@EngineRegistry.register(model_type=LANGUAGE_MODEL, backend=["fsdp"], device=DEVICES)
@EngineRegistry.register(model_type=VALUE_MODEL, backend=["fsdp"], device=DEVICES)
class FSDP1Refused(compat.BaseEngine):
    """FSDP1 shards by flat parameters and cannot run trees: say so before a GPU is taken."""

    def __init__(self, **_: Any) -> None:
        raise ValueError(
            "tree_rl runs on FSDP2, but the strategy is 'fsdp'; set actor_rollout_ref.actor.strategy=fsdp2, "
            "actor_rollout_ref.ref.strategy=fsdp2 and critic.strategy=fsdp2"
        )
