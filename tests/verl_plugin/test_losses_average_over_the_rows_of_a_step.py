"""A step of `tree_sync` divides by the rows that it holds: stock's engine on the same rows finds the same step."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from engine_harness import build_engine, gradients, ppo_batch, save_model, tiny_qwen3
from equivalence import assert_equal_gradients, run
from hostile_rows import SHAPES, row
from local_trainer import LocalQueue, build_worker, local_queue, make_trainer, put_rows
from rank_processes import run_ranks
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl_losses import AGG_MODES, actor_loss, critic_loss

from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS, TreeConfig
from tree_rl.verl_plugin.trainer.rows_of_step import PADDING_UID

BRANCHES = [[1, 5], [2, 3], [4, 1], [1, 3]]
"""Rows of each session of four prompts; three prompts to a mini-batch make two steps of two prompts."""
UNTRAINED = "uid-1_1_2"
CASES = [
    *(("actor", "vanilla", mode) for mode in AGG_MODES),
    *(("actor", "geo_mean", "token-mean"), ("actor", "gspo", AGG_MODES[3])),
    *(("critic", "", mode) for mode in AGG_MODES[2:]),
]
"""Role, loss, aggregation."""
TREE = TreeConfig(mode="tree", max_tokens=40, self_check=False)
"""A budget that makes several micro-batches of a step."""


def prepared(queue: LocalQueue, *, ranks: int, weighting: str = "verl") -> dict[str, Any]:
    """What the trainer sends to the workers of a step: rows in order, their columns and the flags of both roles."""
    critic = {"ppo_mini_batch_size": 3, "ppo_epochs": 1, "data_loader_seed": 1, "shuffle": False}
    actor = {**critic, "calculate_entropy": True, "entropy_coeff": 0.01}
    actor |= {"fsdp_config": {"tree": {"path_weighting": weighting}}}
    rollout = {"temperature": 0.9, "calculate_log_probs": False}
    roles = {"actor_rollout_ref": {"actor": actor, "rollout": rollout}, "critic": critic}
    trainer = make_trainer(ranks=ranks, critic=True, config=roles)
    batch = put_rows(queue, BRANCHES)
    for number, key in enumerate(sorted(batch.keys)):
        queue.rows[key]["extra_fields"]["row_weight"] = 0.25 + 0.5 * (number % 4)
    row = queue.rows[UNTRAINED]
    row["loss_mask"] = row["response_mask"] = torch.zeros_like(row["response_mask"])
    metrics: dict[str, Any] = {}
    batch = trainer._compute_advantage(trainer._balance_batch(batch, metrics), metrics)
    assert trainer._steps == (2, 2) and any(tag.get("is_padding") for tag in batch.tags)
    trainer.actor_rollout_wg = trainer.critic_wg = workers = Mock(_dispatch_info={"actor": list(range(ranks))})
    flags = {}
    for role, update, asked in (
        ("actor", trainer._update_actor, workers.update_actor),
        ("critic", trainer._update_critic, workers.train_mini_batch),
    ):
        asked.side_effect = InterruptedError
        with pytest.raises(InterruptedError):
            update(batch, metrics)
        flags[role] = dict(asked.call_args.args[0].extra_info)
    real = [not tag.get("is_padding", False) for tag in batch.tags]
    return {"rows": queue.rows, "keys": batch.keys, "real": real, "flags": flags}


def columns(rows: dict[str, Any], keys: list[str], **flags: Any) -> TensorDict:
    """Rows as verl's dispatch hands them to a worker."""
    local = LocalQueue()
    local.rows = rows
    data = local.kv_batch_get(keys, "train")
    data.pop("extra_fields", None)
    budget = {"use_remove_padding": True, "use_dynamic_bsz": True, "max_token_len_per_gpu": 100_000}
    tu.assign_non_tensor(data, **budget, **flags)
    return data


def step_of(sent: dict[str, Any], step: int, ranks: int) -> list[str]:
    """Keys of the real rows of a step on all ranks."""
    places = np.arange(len(sent["keys"])).reshape(ranks, 2, -1)[:, step].flatten()
    return [sent["keys"][place] for place in places if sent["real"][place]]


def loss_of(role: str, loss_mode: str, agg_mode: str) -> Any:
    """With verl's default scale: null divides by the longest response."""
    return actor_loss(loss_mode, agg_mode, loss_scale_factor=None) if role == "actor" else critic_loss(agg_mode)


def steps_of(worker: Any, loss: Any, data: TensorDict) -> tuple[list[Any], dict[str, Any]]:
    """Gradients of every optimizer step, and the metrics of all."""
    worker.set_loss_fn(loss)
    found, stock_step = [], type(worker.engine).optimizer_step

    def noting() -> float:
        found.append(gradients(worker.engine))
        return stock_step(worker.engine)

    worker.engine.optimizer_step = noting
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    return found, {name: values for name, values in metrics.items() if name.endswith("loss")}


def worker_of(root: Path, role: str, tree: TreeConfig = TREE) -> Any:
    """Its weights stay where they are."""
    model_type = "tree_language_model" if role == "actor" else "tree_value_model"
    return build_worker(root / role, model_type=model_type, learning_rate=0.0, tree=tree)


def rank_main(rank: int, root: Path, sent: dict[str, Any]) -> dict[tuple[str, str, str], Any]:
    workers = {role: worker_of(root, role) for role in ("actor", "critic")}
    share = np.array(sent["keys"]).reshape(2, -1)[rank].tolist()
    results = {}
    for case in CASES:
        data = columns(sent["rows"], share, **sent["flags"][case[0]])
        results[case] = steps_of(workers[case[0]], loss_of(*case), data)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("step")
    save_model(root / "actor", tiny_qwen3())
    save_model(root / "critic", tiny_qwen3(), value=True)
    return root


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> tuple[dict[str, Any], list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        sent = prepared(local_queue(patch), ranks=2)
    return sent, run_ranks(rank_main, 2, root, sent)


@pytest.fixture(scope="module")
def stock(root: Path) -> dict[str, Any]:
    return {role: build_engine(root / role, tree=None, value=role == "critic") for role in ("actor", "critic")}


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_two_ranks_is_stocks(two_ranks: Any, stock: dict[str, Any], case: tuple[str, str, str]) -> None:
    (sent, found), role, sizes = two_ranks, case[0], set()
    for step in range(2):
        keys = step_of(sent, step, ranks=2)
        sizes.add(len(keys))
        flags = {**sent["flags"][role], "global_batch_size": len(keys), "calculate_entropy": role == "actor"}
        expected = run(stock[role], columns(sent["rows"], keys, **flags), loss_of(*case))
        assert_equal_gradients(expected["gradients"], found[0][case][0][step])
        for name in [name for name in expected["metrics"] if name.endswith("loss")]:
            mean = np.mean([float(np.sum(_number(of_rank[case][1][name][step]))) for of_rank in found])
            assert mean == pytest.approx(float(_number(expected["metrics"][name])), rel=1e-4), name
    assert len(sizes) == 2, "steps of equally many rows would hide a fixed divisor"


@pytest.mark.parametrize(
    "weighting, agg_mode",
    (
        ("token_unique", "seq-mean-token-sum-norm"),
        ("session", "seq-mean-token-mean"),
        *(pytest.param(name, "seq-mean-token-mean", marks=pytest.mark.slow) for name in ("sep_avg", "custom")),
    ),
)
def test_path_weights_of_a_step_make_a_weighted_average(
    queue: LocalQueue, root: Path, stock: dict[str, Any], weighting: str, agg_mode: str
) -> None:
    torch.manual_seed(0)
    sent = prepared(queue, ranks=1, weighting=weighting)
    loss, of_sums = loss_of("actor", "vanilla", agg_mode), actor_loss("vanilla", agg_mode, loss_scale_factor=1)
    worker = worker_of(root, "actor", replace(TREE, path_weighting=weighting))
    found, metrics = steps_of(worker, loss, columns(sent["rows"], sent["keys"], **sent["flags"]["actor"]))
    for step in range(2):
        keys = step_of(sent, step, ranks=1)
        longest = max(len(sent["rows"][key]["response_mask"]) for key in keys)
        scale = longest if agg_mode == "seq-mean-token-sum-norm" else 1
        expected: dict[str, torch.Tensor] = {}
        total = 0.0
        for key in keys:
            weights, mask = (sent["rows"][key][name] for name in (PATH_WEIGHT_COLUMNS[weighting], "response_mask"))
            total += float(weights[mask.bool()].mean()) if mask.any() else float(weights.max())
            # A loss is linear in what multiplies its tokens, one at a time.
            for weight in weights[mask.bool()].unique().tolist():
                part = gradient_of(stock["actor"], sent, key, of_sums, mask.bool() & (weights == weight))
                for name, gradient in part.items():
                    expected[name] = expected.get(name, 0) + weight / scale * gradient
        assert_equal_gradients({name: value / total for name, value in expected.items()}, found[step])
        # What is reported is the average of rows, as without path weights.
        flags = {**sent["flags"]["actor"], "global_batch_size": len(keys)}
        plain = run(stock["actor"], columns(sent["rows"], keys, **flags), loss)
        for name in ("actor/pg_loss", "actor/entropy_loss"):
            got = float(np.sum(_number(metrics[name][step])))
            assert got == pytest.approx(float(_number(plain["metrics"][name])), rel=1e-4, abs=1e-6)


def gradient_of(stock: Any, sent: dict[str, Any], key: str, loss: Any, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of one row alone as the only sequence, of some of its trained tokens; its length stays the row's."""
    row = dict(sent["rows"][key])
    trained = int(row["response_mask"].sum())
    row["response_mask"] = row["response_mask"] * mask_T
    is_mean = loss.keywords["config"].loss_agg_mode == "seq-mean-token-mean"
    flags = {**sent["flags"]["actor"], "global_batch_size": trained / int(mask_T.sum()) if is_mean else 1}
    return run(stock, columns({key: row}, [key], **flags), loss)["gradients"]


@pytest.mark.parametrize("options", ({"max_tokens": 13}, {"path_weighting": "sep_avg"}))
def test_padding_rows_leave_averages_over_tokens_as_they_are(model_path: Path, options: dict[str, Any]) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", self_check=False, **options))
    padding = row([2, 2, 2], mask=[0], uid=f"{PADDING_UID}_1")
    without, padded = (
        run(engine, ppo_batch(rows), actor_loss("vanilla", "token-mean", kl=False))["metrics"]["actor/ppo_kl"]
        for rows in (SHAPES["branches"], [*SHAPES["branches"], padding])
    )
    assert padded.aggregate() == pytest.approx(without.aggregate()) != 0


def test_verl_names_padding_rows_as_they_are_recognised(queue: LocalQueue) -> None:
    batch = put_rows(queue, [[1]])
    padded = upsample_batch_to_divisible_size(KVBatchMeta(batch.keys, batch.tags, "train"), 3, 2)
    pads = [queue.rows[key] for key in padded.keys[1:]]
    assert len(pads) == 2
    assert all(row["uid"].startswith(PADDING_UID) and not row["loss_mask"].any() for row in pads)


def _number(value: Any) -> Any:
    return value.aggregate() if isinstance(value, Metric) else value
