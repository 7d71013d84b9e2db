"""A chain plan on the layout's device."""

from dataclasses import fields

import numpy as np
import torch

from tree_kernels.host_copy import to_device_together
from tree_kernels.tree_gated_delta_rule.chains import ChainPlan, plan_chains
from tree_kernels.tree_gated_delta_rule.tiles import tile_plan
from tree_kernels.tree_layout import TreeLayout, kept

DevicePlan = ChainPlan[torch.Tensor]


@kept
def device_plan(layout: TreeLayout, tile_tokens: int, wanted: tuple[int, ...]) -> DevicePlan:
    """The chains of a layout on its device, with tiles of C = `tile_tokens` rows; cached with it."""
    plan = plan_chains(tile_plan(layout, tile_tokens, wanted))
    padding = ((0, 0), (0, tile_tokens - plan.token.shape[1]))
    arrays = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "levels"}
    arrays["token"] = np.pad(plan.token, padding, constant_values=layout.num_tokens)
    arrays["row_end"] = np.pad(plan.row_end, padding)
    tensors = to_device_together(list(arrays.values()), layout.device)
    return ChainPlan(levels=plan.levels, **dict(zip(arrays, tensors, strict=True)))
