"""After a forward or backward failed on one FSDP2 rank: catch up with the other ranks, then restart together.

The other ranks wait in collectives of the failed op. The failed rank has counted the collectives it issued. It runs the
agreed schedule again with dummies, skips that many collectives and issues the rest. All ranks then end the call.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tree_rl.models.sequence_parallel import IssuedCollectives


class CountedCollectives(IssuedCollectives):
    """Counts the collectives that FSDP2 issues in a call; after `restart` it skips those issued before."""

    def __init__(self, root: FSDPModule) -> None:
        """Count the all-gathers and reduce-scatters of `root` and all FSDP modules in it.

        Args:
            root: the module on which `fully_shard` was called last, sharded over one mesh dimension.
        """
        super().__init__()
        assert isinstance(root, nn.Module)
        self._root = root
        self._modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_custom_all_gather(_CountedAllGather(self))
            module.set_custom_reduce_scatter(_CountedReduceScatter(self))

    def start(self) -> None:
        """Start a call with sharded parameters on every rank, so that all ranks issue the same collectives."""
        for module in self._modules:
            module.reshard()
        super().start()

    def restart(self) -> None:
        """Start the call again after a failure, without the collectives that this rank has issued already."""
        reset_iteration(self._root)
        super().restart()


class _CountedAllGather(DefaultAllGather):
    def __init__(self, counter: CountedCollectives) -> None:
        super().__init__()
        self._counter = counter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if self._counter.issues_next() else None


class _CountedReduceScatter(DefaultReduceScatter):
    def __init__(self, counter: CountedCollectives) -> None:
        super().__init__()
        self._counter = counter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if self._counter.issues_next() else None


def reset_iteration(root: FSDPModule) -> None:
    """Undo a failed forward or backward: reshard parameters, reset hook state, drop gradients that are not reduced yet.

    Reduced gradients stay in the sharded parameters' `grad`.
    """
    state = root._get_fsdp_state()
    states = state._state_ctx.all_states
    # torch 2.13 has a public method, which keeps unreduced gradients; torch 2.11 has none.
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_hook_state(state)
    for group in (group for each in states for group in parameter_groups(each)):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _reset_hook_state(root_state: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    communication, shared = root_state._comm_ctx, root_state._state_ctx
    communication.all_gather_state = None
    communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    for state in shared.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        for group in parameter_groups(state):
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()


def parameter_groups(state: Any) -> list[Any]:
    """FSDP2's parameter groups of one module: a list since torch 2.12, one or none before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def has_run(module: FSDPModule) -> bool:
    """True if FSDP2 has gathered the module's own weights before."""
    groups = parameter_groups(module._get_fsdp_state())
    return all(hasattr(parameter, "_unsharded_param") for group in groups for parameter in group.fsdp_params)
