"""verl's `router_replay.mode` on trees: routers repeat the experts to which each row's tokens were routed before.

R2 records them when old log-probs are computed and repeats them in the update; R3 repeats those of the rollout, which
verl stores in the column `routed_experts`. Verl's FSDP engine does neither.
Legend: B rows, F flat tokens of all rows, L decoder layers, K experts per token, E experts of a layer.
"""

from dataclasses import replace

import numpy as np
from tensordict import TensorDict

from tree_rl.models.routers.merge_routes import NATIVE, drop_filler
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.support import UnsupportedModelError
from tree_rl.training.rows import Rows
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.rows_in import jagged
from tree_rl.verl_plugin.options import RECORDED, REPLAY_KEY, REPLAYS, ROLLOUT, ROUTES


class RouterReplay:
    """Records or repeats routes in the calls of one engine."""

    def __init__(self, hooks: RouterHooks, mode: str) -> None:
        """Check an engine's routers for a mode, R2 or R3.

        Raises:
            UnsupportedModelError: routers whose choice cannot be set, or one expert per token in R3, where verl's zeros
                for tokens without a record look like expert 0.
        """
        if hooks.unknown_router is not None:
            raise UnsupportedModelError(
                f"{REPLAY_KEY}={mode}: routes cannot be replayed through {hooks.unknown_router}; set it to disabled"
            )
        if mode == ROLLOUT and hooks.experts_per_token < 2:
            raise UnsupportedModelError(
                f"{REPLAY_KEY}={mode}: with one expert per token verl's zeros for tokens without a record look like "
                f"expert 0; set it to {RECORDED}"
            )
        self._hooks, self._mode = hooks, mode

    def in_rows(self, data: TensorDict, rows: Rows, *, trains: bool) -> tuple[Rows, bool]:
        """The rows of a call with the routes that it repeats, and True if it records them.

        R2 records only with the weights of the old log-probs.

        Raises:
            RowError: routes are missing, or do not fit the row or the model.
        """
        if not tu.get_non_tensor_data(data=data, key=REPLAYS, default=True):
            return rows, False
        if not trains and self._mode == RECORDED:
            return rows, True
        return self._with_routes(data, rows) if rows.num_rows else rows, False

    def _with_routes(self, data: TensorDict, rows: Rows) -> Rows:
        if ROUTES not in data:
            source = {
                RECORDED: "compute old log-probs with this engine (algorithm.rollout_correction.bypass_mode=False)",
                ROLLOUT: "set actor_rollout_ref.rollout.enable_rollout_routing_replay=True and a rollout that records",
            }
            raise RowError(f"{REPLAY_KEY}={self._mode}: the rows carry no {ROUTES}; {source[self._mode]}")
        if not data[ROUTES].is_nested:
            shape = tuple(data[ROUTES].shape)
            raise RowError(f"{ROUTES}: expected a nested tensor of whole rows, received a padded {shape}")
        offsets, routes_FLK = jagged(data[ROUTES])
        lengths, expected = np.diff(offsets), np.diff(rows.offsets)
        wrong = np.flatnonzero(lengths != expected)
        if len(wrong):
            row = int(wrong[0])
            raise RowError(f"{rows.label_B[row]}: {ROUTES} of {lengths[row]} tokens for a row of {expected[row]}")
        return replace(rows, routes_FLK=self._checked(routes_FLK, rows))

    def _checked(self, routes_FLK: np.ndarray, rows: Rows) -> np.ndarray:
        hooks = self._hooks
        expected = (hooks.num_layers, hooks.experts_per_token)
        if routes_FLK.shape[1:] != expected:
            raise RowError(
                f"{ROUTES}: expected routes of all {expected[0]} decoder layers (any numbers where a layer has no "
                f"experts) with {expected[1]} experts per token, received {tuple(routes_FLK.shape[1:])}",
            )
        # Layers without experts get the same value everywhere, whatever the recorder wrote there.
        routes = np.full(routes_FLK.shape, NATIVE, dtype=np.int16)
        layers = list(hooks.layers)
        routes[:, layers] = routes_FLK[:, layers]
        outside = ((routes < NATIVE) | (routes >= hooks.num_experts)).any(axis=(1, 2))
        if outside.any():
            row = int(np.searchsorted(rows.offsets, int(outside.argmax()), side="right")) - 1
            raise RowError(f"{rows.label_B[row]}: {ROUTES} names an expert outside [0, {hooks.num_experts})")
        return drop_filler(routes) if hooks.experts_per_token > 1 else routes
