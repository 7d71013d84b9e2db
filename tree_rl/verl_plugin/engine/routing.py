"""What a tree engine does with experts' routers: count their load, charge imbalance, record and repeat routes.

Both are off unless asked for, by `tree.router_aux_loss_coef` and `router_replay.mode`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tensordict import TensorDict
from torch import nn

from tree_rl.training.routing import ForestRouting
from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.compat import get_device_id
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.build import LANGUAGE_MODEL, TreeReadingEngine
from tree_rl.verl_plugin.engine.expert_balance import ExpertBalance
from tree_rl.verl_plugin.engine.features import UnsupportedFeatureError
from tree_rl.verl_plugin.engine.router_replay import (
    COLUMN,
    DISABLED,
    FLAG,
    KEY,
    RouterReplay,
    replay_mode,
    routes_to_replay,
)
from tree_rl.verl_plugin.engine.rows import Rows


class TreeRoutingEngine(TreeReadingEngine):
    """The routing of every forest that runs; a dense model has none."""

    is_reference = False
    """Whether the model runs as verl's reference policy inside the actor, without its adapters."""

    @cached_property
    def balance(self) -> ExpertBalance | None:
        """Load and auxiliary loss of experts; None where they are not asked for."""
        coef = self.tree_config.router_aux_loss_coef
        if self.router_hooks is None or coef is None:
            return None
        return ExpertBalance(self.router_hooks, coef, self.get_data_parallel_group())

    @cached_property
    def replay(self) -> RouterReplay | None:
        """Record and replay of routes; None where `router_replay.mode` is disabled."""
        mode = replay_mode(self.engine_config)
        return None if self.router_hooks is None or mode == DISABLED else RouterReplay(self.router_hooks, mode)

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        # Routers that cannot repeat routes are refused here, before anything is sharded.
        _ = self.replay
        return module

    def begin_routing(self, data: TensorDict, forward_only: bool) -> None:
        """Before a call: whether it records or repeats routes.

        Raises:
            UnsupportedFeatureError: the call wants routes, or an actor's rows carry some, but no mode is set.
        """
        if self.replay is not None:
            self.replay.begin(data, forward_only=forward_only, is_reference=self.is_reference)
        elif tu.get_non_tensor_data(data=data, key=FLAG, default=False):
            raise UnsupportedFeatureError(f"{FLAG}=True, but {KEY}=disabled; set actor_rollout_ref.actor.{KEY}")
        elif COLUMN in data and self.stock_model_type == LANGUAGE_MODEL and not self.engine_config.forward_only:
            raise UnsupportedFeatureError(
                f"rows carry {COLUMN}, which {KEY}=disabled ignores; set actor_rollout_ref.actor.{KEY}=R3 to repeat "
                "them, or actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            )

    def open_routing(self, forest: Forest, rows: Rows, members: list[int]) -> ForestRouting | None:
        """What the routers do on a forest that is about to run; None where nobody asks.

        Args:
            forest: of some rows of the call.
            rows: all rows of the call.
            members: the forest's rows' indices in it.
        """
        if self.router_hooks is None:
            return None
        weight_LE = None if self.balance is None else self.balance.weight
        routes = routes_to_replay(forest, rows, members)
        return ForestRouting(forest, get_device_id(), routes=routes, weight_LE=weight_LE)

    def close_routing(
        self, routing: ForestRouting, selected: TensorDict, members: list[int], output: dict[str, Any], inference: bool
    ) -> None:
        """After a forest ran: count its experts' load, and add its routes to verl's output where they are recorded."""
        if self.balance is not None:
            self.balance.note(routing, members, inference)
        if self.replay is not None and self.replay.records:
            output["model_output"][COLUMN] = self.nested(self.replay.recorded(routing), selected)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """verl's reference policy inside the actor: another model, whose routes and log-probs are its own."""
        self.is_reference = True
        try:
            with super().disable_adapter():
                yield
        finally:
            self.is_reference = False
