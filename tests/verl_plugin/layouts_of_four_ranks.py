"""What four ranks run in `test_engine_sequence_parallel.py`: each layout of them trains shares of the same rows."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_harness import Row, build_engine, gradients, nested, ppo_batch
from equivalence import actor_loss
from hostile_rows import SHAPES
from rank_engines import empty_batch, join
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from tree_rl.verl_plugin.options import TreeConfig

WORLD = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "sp 2 x dp 2": {"ulysses_sequence_parallel_size": 2},
    "sp 4": {"ulysses_sequence_parallel_size": 4},
    "replicas 2": {"fsdp_size": 2},
    "sp 2 x dp 2, replicas 2": {"ulysses_sequence_parallel_size": 2, "fsdp_size": 2},
}
SHARING = [layout for layout in LAYOUTS if layout.startswith("sp")]
NAMES = (
    *("branches", "comb", "identical", "strict_prefix", "masks_differ_on_shared_prefix", "one_row_untrained"),
    *("no_common_root", "temperatures_differ", "prompts_of_different_length", "single_response_token"),
)
SFT = "sft"
LOSSES: dict[str, Any] = {
    "vanilla": actor_loss("vanilla", "token-mean"),
    "gspo": actor_loss("gspo", "seq-mean-token-mean"),
    SFT: partial(sft_loss, config=None),
}
BUDGETS = (None, 13)
CASES = [
    *(("sp 2 x dp 2", loss, 13) for loss in ("gspo", SFT)),
    *((layout, "vanilla", budget) for layout in LAYOUTS for budget in BUDGETS),
]
SGD = {"optimizer": "SGD", "lr": 0.5, "weight_decay": 0.0, "override_optimizer_config": {"momentum": 0.9}}
"""Unlike Adam it does not blow up the rounding of gradients near 0."""


def whole_rows() -> list[Row]:
    """Hostile groups."""
    return [replace(one, uid=name) for name in NAMES for one in SHAPES[name]]


def whole_batch(**flags: Any) -> TensorDict:
    """All of them."""
    rows = whole_rows()
    return ppo_batch(rows, calculate_entropy=True, global_batch_size=len(rows), **flags)


def with_whole_masks(data: TensorDict) -> TensorDict:
    """The rows as verl's SFT loss reads them: a mask over the whole row."""
    pairs = zip(data["input_ids"].unbind(), data["loss_mask"].unbind(), strict=True)
    masks = [torch.cat([mask.new_zeros(len(ids) - len(mask)), mask]) for ids, mask in pairs]
    data["loss_mask"] = nested(masks)
    return data


def share_of(engine: Any, *, only_first: bool = False) -> TensorDict:
    """This rank's rows of the whole batch; all of them on the first ranks, if the others shall have none."""
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    data = whole_batch()
    if only_first:
        return data if rank == 0 else empty_batch()
    return tu.index_select_tensor_dict(data, list(range(rank, len(data), ranks)))


def update(engine: Any, data: TensorDict, loss: Any) -> dict[str, Any]:
    """Loss and gradients of one forward and backward."""
    engine.optimizer_zero_grad()
    with engine.train_mode(disable_auto_offload=True):
        output = engine.forward_backward_batch(data, loss)
        return {"loss": sum(output["loss"]), "gradients": gradients(engine), "metrics": output["metrics"]}


def infer(engine: Any, data: TensorDict) -> dict[str, Any]:
    """Outputs of one inference."""
    with engine.eval_mode(disable_auto_offload=True):
        return dict(engine.infer_batch(data)["model_output"])


def step(engine: Any) -> dict[str, Any]:
    """One optimizer step: the norm that it clips, the next learning rate, and the weights after it."""
    with engine.train_mode(disable_auto_offload=True):
        engine.forward_backward_batch(share_of(engine), LOSSES["vanilla"])
        norm = engine.optimizer_step()
    return {"norm": norm, "learning_rate": engine.lr_scheduler_step(), "weights": weights_of(engine)}


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Full weights by name."""
    full = {}
    for name, weight in engine.module.named_parameters():
        full[name] = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()
    return full


def run_policy(model: Path, layout: str, folder: Path) -> dict[str, Any]:
    """Every loss, whole and in partitions, inference, two steps, and a checkpoint between them."""
    engine = build_engine(model, tree=TreeConfig(mode="tree"), engine=LAYOUTS[layout], optimizer=SGD)
    found: dict[str, Any] = {"outputs": infer(engine, share_of(engine)), "check": engine.step.self_check.error}
    for name, budget in [case[1:] for case in CASES if case[0] == layout]:
        engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
        data = share_of(engine)
        found[name, budget] = update(engine, with_whole_masks(data) if name == SFT else data, LOSSES[name])
    found["one with rows"] = update(engine, share_of(engine, only_first=True), LOSSES["vanilla"])
    engine.optimizer_zero_grad()
    found["first"] = step(engine)
    saved = folder / layout.replace(" ", "_")
    engine.save_checkpoint(str(saved))
    found["second"] = step(engine)
    engine.load_checkpoint(str(saved), del_local_after_load=False)
    found["loaded"] = weights_of(engine)
    found["repeated"] = step(engine)
    sharded = {name: size for name, size in LAYOUTS[layout].items() if name == "fsdp_size"}
    other = build_engine(model, tree=TreeConfig(mode="tree"), engine=sharded, optimizer=SGD)
    other.load_checkpoint(str(saved), del_local_after_load=False)
    found["elsewhere"] = weights_of(other)
    found["may_repeat"] = engine.step.context.may_repeat
    return found


def rank_main(rank: int, world: int, _: str, out: str, port: int) -> None:
    """Everything on this rank, under every layout."""
    join(rank, world, port)
    folder = Path(out)
    found = {layout: run_policy(folder / "model", layout, folder) for layout in LAYOUTS}
    torch.save(found, f"{out}/rank_{rank}.pt")
    torch.distributed.destroy_process_group()
