"""What one rank trains in each arm: the same rows, cut and placed as that arm's trainer does it.

Legend: B rows, D ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from many_gpus.ranks import DEVICE
from tensordict import TensorDict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.config import FSDPActorConfig

from tree_rl.benchmark.against_verl.engines import CLIP
from tree_rl.benchmark.against_verl.worker_rows import rows_as_received, rows_to_update
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.phases import OLD_LOG_PROBS, UPDATE, Stopwatch, UpdateTimes
from tree_rl.cost import ModelShape
from tree_rl.cost.balance.batch import lay_out_groups, number_groups, paths_of_groups
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.verl_plugin.compat import ppo_loss, sft_loss
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS
from whole_models.random_engine import RandomWeightsEngine, mode_of

TREE, ON_POLICY, PACKED, STOCK = "tree", "tree_on_policy", "packed", "verl"
"""Trees; trees that take old log-probs from the update's own forward; the same rows end to end without trees, through
the same kernels; stock verl."""
PARTITIONED = "partitioned"
"""Trees whose budget is below the largest one; the arm's name goes on with the share."""
PPO, SFT = "ppo", "sft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Rows of one rank in one arm."""

    batch: Batch
    imbalance: float
    """Predicted time of the slowest rank over the mean of all."""
    operations: float
    """Operations of one forward and backward on this rank."""
    largest_tree: int
    """Unique tokens of the largest tree of any rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train the rows of a step."""

    name: str
    share: Share
    max_tokens: int
    """Most tokens of one forward; unique tokens where rows share any."""

    @property
    def mode(self) -> str:
        """`tree.mode` of the engine."""
        return "flat" if self.name == STOCK else "tree"


def apart(batch: Batch) -> Batch:
    """The same rows, none of which shares a token with another."""
    return replace(batch, groups=tuple(f"row {index}" for index in range(len(batch.rows))))


def select(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows."""
    return replace(
        batch,
        rows=tuple(batch.rows[row] for row in rows),
        trained=tuple(batch.trained[row] for row in rows),
        groups=tuple(batch.groups[row] for row in rows),
        advantage_B=batch.advantage_B[list(rows)],
    )


def balanced(batch: Batch, shape: ModelShape, *, rank: int, world: int) -> Share:
    """This rank's rows as the tree trainer lays them out: groups stay whole unless splitting one is faster."""
    group_of_row = number_groups(batch.groups)
    paths = paths_of_groups(group_of_row, batch.rows, shape.cost)
    layout = lay_out_groups(group_of_row, paths, num_ranks=world, num_cells=1)
    slots = layout.order.reshape(world, -1)
    return _share(batch, shape, [slots[other][slots[other] < layout.num_rows].tolist() for other in range(world)], rank)


def as_verl_balances(batch: Batch, shape: ModelShape, *, rank: int, world: int) -> Share:
    """This rank's rows as stock verl's `_balance_batch` gives them out; ranks differ in their rows if it must be."""
    workload = calculate_workload(torch.tensor([len(row) for row in batch.rows])).tolist()
    parts: list[list[int]] = [[]] * world
    if len(workload) >= world:
        parts = get_seqlen_balanced_partitions(workload, k_partitions=world, equal_size=len(workload) % world == 0)
    return _share(apart(batch), shape, parts, rank)


def _share(batch: Batch, shape: ModelShape, rows_of_rank: Sequence[Sequence[int]], rank: int) -> Share:
    if not all(rows_of_rank):
        raise SystemExit(
            f"{len(batch.rows)} rows do not give {len(rows_of_rank)} ranks one each; raise --flat-tokens "
            "or lower --gpus"
        )
    parts = [select(batch, rows) for rows in rows_of_rank]
    operations = [shape.cost.forest(part.forest(), Jagged.from_rows(part.trained)) for part in parts]
    return Share(
        batch=parts[rank],
        imbalance=float(np.max(operations) / np.mean(operations)),
        operations=operations[rank],
        largest_tree=max(select(part, rows).forest().num_unique for part in parts for rows in part.rows_of_groups()),
    )


def arms_of(
    batch: Batch,
    shape: ModelShape,
    names: Sequence[str],
    *,
    max_tokens: int,
    stock_max_tokens: int,
    budget_shares: Sequence[float],
    rank: int,
    world: int,
) -> Iterator[Arm]:
    """The arms that were asked for, and one in partitions for each share of the largest tree of any rank."""
    place: dict[str, Any] = {"shape": shape, "rank": rank, "world": world}
    trees = balanced(batch, **place)
    longest = max(len(row) for row in batch.rows)
    for name in names:
        if name == STOCK:
            # Stock verl refuses a longer row.
            budget = max(stock_max_tokens, longest)
            yield Arm(name=name, share=as_verl_balances(batch, **place), max_tokens=budget)
        else:
            share = balanced(apart(batch), **place) if name == PACKED else trees
            yield Arm(name=name, share=share, max_tokens=max_tokens)
    for share_of_tree in budget_shares:
        budget = max(1, round(share_of_tree * trees.largest_tree))
        yield Arm(name=f"{PARTITIONED}_{share_of_tree:g}", share=trees, max_tokens=budget)


def loss_of(kind: str) -> Any:
    """verl's own loss: PPO's clipped objective without a KL term, or the mean negative log-prob."""
    actor = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = FSDPActorConfig(**actor, clip_ratio=CLIP, entropy_coeff=0.0, use_kl_loss=False)
    return partial(ppo_loss if kind == PPO else sft_loss, config=config)


def rows_of(arm: Arm, kind: str, *, all_rows: int) -> TensorDict:
    """The rows as verl's workers receive them before old log-probs are known; `all_rows` of all ranks."""
    data = rows_as_received(arm.share.batch, max_tokens=arm.max_tokens)
    tu.assign_non_tensor(data, global_batch_size=all_rows)
    if kind == SFT:
        trained = [torch.from_numpy(marks.astype(np.int64)) for marks in arm.share.batch.trained]
        data["loss_mask"] = torch.nested.as_nested_tensor(trained, layout=torch.jagged)
        tu.assign_non_tensor(data, calculate_entropy=False)
    return data


def run_step(engine: RandomWeightsEngine, arm: Arm, kind: str, *, all_rows: int, moves: bool = True) -> UpdateTimes:
    """One timed step: old log-probs where the arm needs them, forward, backward and, if it `moves`, the optimizer."""
    data = rows_of(arm, kind, all_rows=all_rows)
    clock = Stopwatch(torch.device(DEVICE))
    with mode_of(engine, arm.mode):
        if kind == PPO:
            data = _with_old_log_probs(engine, arm, data, clock, all_rows)
        with clock.phase(UPDATE), engine.train_mode(disable_auto_offload=True, zero_grad_on_exit=moves):
            if moves:
                engine.train_batch(data, loss_of(kind))
            else:
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(data, loss_of(kind))
    if arm.name == ON_POLICY:
        engine.take_outputs_of_update()
    return clock.stop()


def _with_old_log_probs(
    engine: RandomWeightsEngine, arm: Arm, data: TensorDict, clock: Stopwatch, all_rows: int
) -> TensorDict:
    if arm.name == ON_POLICY:
        log_probs = torch.nested.as_nested_tensor(
            [torch.zeros(len(row)) for row in arm.share.batch.rows], layout=torch.jagged
        )
        data = rows_to_update(data, arm.share.batch, log_probs)
        del data["old_log_probs"]
        tu.assign_non_tensor(data, **{REUSE_LOG_PROBS: True})
    else:
        with clock.phase(OLD_LOG_PROBS), engine.eval_mode(disable_auto_offload=True):
            log_probs = engine.infer_batch(data)["model_output"]["log_probs"]
        data = rows_to_update(data, arm.share.batch, log_probs)
    # `rows_to_update` counts this rank's rows.
    tu.assign_non_tensor(data, global_batch_size=all_rows)
    return data
