"""The trainer's batch from sampling to advantages, on a queue that lives in this process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from local_trainer import BRANCHES, LocalQueue, make_trainer, put_rows
from omegaconf import OmegaConf

from tree_rl.credit import ESTIMATORS, CreditTree
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS
from tree_rl.verl_plugin.path_weights import custom_weights, custom_weights_name
from tree_rl.verl_plugin.trainer import queue_rows, step_metrics


def test_groups_keep_one_mini_batch_and_steps_do_not_grow(queue: LocalQueue) -> None:
    batch = put_rows(queue, BRANCHES)
    for tag in batch.tags:
        tag |= {"min_global_steps": 2, "max_global_steps": 3}
    trainer = make_trainer(critic=True)
    balanced = trainer._balance_batch(batch, metrics := {})
    assert trainer._steps == (3, 2)
    # Six cells serve three actor and two critic mini-batches alike.
    assert len(balanced) % (2 * 6) == 0
    for steps in (3, 2, 6):
        homes: dict[str, set[int]] = {}
        block = len(balanced) // (2 * steps)
        for row, key in enumerate(balanced.keys):
            if not balanced.tags[row].get("is_padding", False):
                homes.setdefault(key.rsplit("_", 2)[0], set()).add(row // block % steps)
        assert all(len(found) == 1 for found in homes.values())
        assert len(homes) == len(BRANCHES)
    assert metrics["tree/imbalance"] >= 1
    assert {"tree/split_groups", "tree/repeated_tokens", "tree/padding_rows"} <= metrics.keys()
    # The fifth step trains the weights of the fourth.
    assert (metrics["tree/staleness/oldest/max"], metrics["tree/staleness/newest/max"]) == (2, 1)
    assert metrics["tree/sessions"] == 12
    assert metrics["tree/paths_per_session/max"] == 4
    assert 0 < metrics["tree/por"] < 1
    assert metrics["tree/token_bound"] == pytest.approx(1 / (1 - metrics["tree/por"]))
    assert metrics["tree/flat_tokens"] == sum(tag["seq_len"] for tag in batch.tags)


def test_lags_count_from_the_oldest_and_newest_version_of_rows_that_have_one() -> None:
    spans = [(3, 3), (1, 3), (2, 2), (4, 4), (None, None)]
    tags = [{"min_global_steps": low, "max_global_steps": high} for low, high in spans]
    figures = step_metrics.staleness_metrics(tags, np.array([0, 0, 1, 2, 2]), trainer_version=4)
    assert figures["tree/staleness/oldest/mean"] == (1 + 3 + 2 + 0) / 4
    assert figures["tree/staleness/newest/mean"] == (1 + 1 + 2 + 0) / 4
    assert (figures["tree/staleness/oldest/max"], figures["tree/staleness/newest/max"]) == (3, 2)
    # Group 0 has rows of several versions, one of which was continued.
    assert (figures["tree/mixed_version_rows"], figures["tree/mixed_version_trees"]) == (1 / 4, 1 / 3)
    assert step_metrics.staleness_metrics([{}, tags[-1]], np.array([0, 0]), trainer_version=4) == {}


def test_ranks_that_share_tokens_are_one_and_a_reference_policy_of_others_gets_equal_shares(queue: LocalQueue) -> None:
    trainer = make_trainer()
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 0, 0, 1, 1, 1, 1]})
    plain = trainer._balance_batch(put_rows(queue, BRANCHES), {})
    assert trainer._steps[0] == 3 and len(plain) % (2 * 3) == 0
    trainer.use_reference_policy, trainer.ref_in_actor = True, False
    trainer.ref_policy_wg = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: list(range(8)))
    padded = trainer._balance_batch(put_rows(queue, BRANCHES), {})
    assert trainer.ref_policy_wg._dispatch_info == {"ref": list(range(8))}
    # 3 mini-batches of 2 ranks of equally many rows, which 8 reference ranks share evenly.
    assert len(padded) % 24 == 0
    assert len(padded) - len(plain) < 24


def advantages(trainer: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    metrics: dict[str, Any] = {}
    return trainer._compute_advantage(trainer._balance_batch(batch, metrics), metrics), metrics


def weighing_trainer(weighting: str, *, ranks: int = 2, **options: Any) -> Any:
    engine = {"fsdp_config": {"tree": {"path_weighting": weighting, **options}}, "ppo_mini_batch_size": 8}
    return make_trainer(ranks=ranks, config={"actor_rollout_ref": {"actor": engine}})


@pytest.mark.parametrize("estimator", ["grpo", "gae", "gdpo"])
def test_advantages_pass_through_the_queue(queue: LocalQueue, estimator: str) -> None:
    trainer = make_trainer(estimator, gdpo_reward_keys=["a", "b"])
    rows = put_rows(queue, BRANCHES)
    given = {key: queue.rows[key]["loss_weight"].clone() for key in rows.keys}
    batch, metrics = advantages(trainer, rows)
    assert all(torch.equal(queue.rows[key]["loss_weight"], weight) for key, weight in given.items())
    assert np.isfinite(metrics["tree/session_score/mean"])
    by_session: dict[str, set[float]] = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        row = queue.rows[key]
        assert row["advantages"].shape == row["response_mask"].shape
        if tag.get("is_padding", False):
            assert not row["advantages"].any() and not row["returns"].any()
        elif estimator != "gae":
            trained = row["advantages"][row["response_mask"].bool()]
            by_session.setdefault(key.rsplit("_", 1)[0], set()).update(trained.tolist())
    assert all(len(values) == 1 for values in by_session.values())


def test_the_kl_controller_counts_no_padding_and_a_correction_weighs_all_rows(queue: LocalQueue) -> None:
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "bypass_mode": False}
    trainer = make_trainer("rloo", use_kl_in_reward=True, ranks=3, rollout_correction=correction)
    batch = put_rows(queue, BRANCHES)
    num_rows = len(batch)
    balanced, metrics = advantages(trainer, batch)
    assert len(balanced) > num_rows and trainer.kl_steps_seen == [num_rows]
    assert "actor/reward_kl_penalty" in metrics and any(key.startswith("rollout_corr/") for key in metrics)
    for row in (queue.rows[key] for key in balanced.keys):
        assert "token_level_rewards" in row and row["rollout_is_weights"].shape == row["response_mask"].shape


def test_calls_that_weigh_less_have_smaller_advantages(queue: LocalQueue) -> None:
    first = put_rows(queue, BRANCHES)
    advantages(make_trainer(), first)
    plain = {key: queue.rows[key]["advantages"].clone() for key in first.keys}
    weighed = first.keys[0]
    second = put_rows(queue, BRANCHES)
    weights = [0.25, *[1.0] * (len(queue.rows[weighed]["response_mask"]) - 1)]
    queue.rows[weighed]["extra_fields"]["response_weights"] = weights
    second.tags[second.keys.index(weighed)]["weighs_calls"] = True
    advantages(make_trainer(), second)
    assert plain[weighed][0] != 0
    for key, values in plain.items():
        expected = values * torch.tensor(weights) if key == weighed else values
        assert torch.equal(queue.rows[key]["advantages"], expected)


def test_calls_of_sub_agents_are_counted_by_name_where_names_are_few(queue: LocalQueue) -> None:
    batch = put_rows(queue, [[1, 1]])
    for key, agents in zip(sorted(batch.keys), (["main", "critic", "critic"], ["main"]), strict=True):
        queue.rows[key]["extra_fields"]["call_agents"] = agents
    by_key = dict(zip(batch.keys, queue_rows.fetch_session_figures(batch, np.arange(2)), strict=True))
    first, second = (by_key[key] for key in sorted(batch.keys))
    assert first["calls_of_critic"] == 2.0 and "a" in first and "calls_of_critic" not in second
    queue.rows[batch.keys[0]]["extra_fields"]["call_agents"] = [f"agent-{number}" for number in range(20)]
    assert all("calls_of" not in name for one in queue_rows.fetch_session_figures(batch, np.arange(2)) for name in one)


def test_a_missing_reward_component_is_named(queue: LocalQueue) -> None:
    with pytest.raises(ValueError, match=r"row uid-.*gdpo_reward_keys asks for 'style'"):
        advantages(make_trainer("gdpo", gdpo_reward_keys=["a", "style"]), put_rows(queue, BRANCHES))


@pytest.mark.parametrize("weighting", ["sep_avg", "token_unique"])
def test_path_weights_of_split_groups_count_the_whole_group(queue: LocalQueue, weighting: str) -> None:
    batch, metrics = advantages(weighing_trainer(weighting, ranks=6), put_rows(queue, [[3, 5], [1]]))
    assert metrics["tree/split_groups"] > 0
    rows = [queue.rows[key] for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    weights = [row[PATH_WEIGHT_COLUMNS[weighting]] for row in rows]
    assert [len(one) for one in weights] == [len(row["response_mask"]) for row in rows]
    if weighting == "sep_avg":
        # The prompt of eight rows and that of one.
        found = {(row["uid"], *one.unique().tolist()) for row, one in zip(rows, weights, strict=True)}
        assert found == {("uid-0", 1 / 8), ("uid-1", 1.0)}
        return
    paths = {
        (row["uid"], *row["input_ids"][: len(row["input_ids"]) - len(one) + index + 1].tolist())
        for row, one in zip(rows, weights, strict=True)
        for index in row["response_mask"].nonzero().flatten().tolist()
    }
    # Each unique trained token weighs one in all.
    assert float(sum(one.sum() for one in weights)) == pytest.approx(len(paths))


@pytest.mark.parametrize("weighting", ["session", "custom"])
def test_weights_of_sessions_and_of_ones_own_reach_the_rows(queue: LocalQueue, weighting: str) -> None:
    first = put_rows(queue, [[3, 5], [1]])
    for key in first.keys:
        report = queue.rows[key]["extra_fields"]["reward_extra_info"]
        report["a"] = abs(report["a"])
    queue.rows["uid-0_0_1"]["extra_fields"]["a"] = [0.5] * len(queue.rows["uid-0_0_1"]["response_mask"])
    advantages(weighing_trainer(weighting, custom_weights="a"), first)
    for key in first.keys:
        row = queue.rows[key]
        (weight,) = row[PATH_WEIGHT_COLUMNS[weighting]].unique().tolist()
        own = 0.5 if key == "uid-0_0_1" else row["extra_fields"]["reward_extra_info"]["a"]
        by_session = {"uid-0_0": 1 / 3, "uid-0_1": 1 / 5, "uid-1_0": 1.0}[key.rpartition("_")[0]]
        assert weight == pytest.approx(own if weighting == "custom" else by_session)
        assert len(row[PATH_WEIGHT_COLUMNS[weighting]]) == len(row["response_mask"])


def depth_weights(tree: CreditTree) -> np.ndarray:
    depth_V = np.zeros(len(tree.parent_V))
    for node in range(1, len(depth_V)):
        depth_V[node] = depth_V[tree.parent_V[node]] + 1
    return tree.on_nodes(depth_V)


def test_a_function_of_the_tree_weighs_tokens(queue: LocalQueue) -> None:
    batch = put_rows(queue, [[1, 1, 1]])
    advantages(weighing_trainer("custom", custom_weights=f"{depth_weights.__module__}.depth_weights"), batch)
    # Sessions share the prompt alone: all response tokens lie in nodes of depth 1.
    assert all(set(queue.rows[key][PATH_WEIGHT_COLUMNS["custom"]].tolist()) == {1.0} for key in batch.keys)


def test_a_row_without_its_weight_is_named(queue: LocalQueue) -> None:
    trainer, missing = weighing_trainer("custom"), "expected a number, .* received none"
    with pytest.raises(ValueError, match=rf"row 0: tree\.custom_weights=row_weight: {missing}"):
        advantages(trainer, put_rows(queue, BRANCHES))
    other = {"critic": {"fsdp": {"tree": {"path_weighting": "custom", "custom_weights": "b"}}}}
    with pytest.raises(ValueError, match=r"actor and critic name \['b', 'row_weight'\]"):
        custom_weights_name(OmegaConf.merge(trainer.config, other))
    for wrong in ("much", [1.0, [2.0]]):
        with pytest.raises(ValueError, match=r"row 1: tree\.custom_weights=a: .*; expected numbers"):
            custom_weights("a", [2, 2], [{"a": 1.0}, {"a": wrong}], [])
    # Also where the row trains nothing: the divisor of an average over sequences counts it.
    for bad in (float("nan"), [1.0, -0.5]):
        with pytest.raises(ValueError, match=r"row 1: .*=a: expected finite .* at least 0, received (nan|-0\.5)"):
            custom_weights("a", [2, 2], [{"a": 1.0}, {"a": bad}], [])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_of_trees_runs_in_the_trainer(queue: LocalQueue, estimator: str) -> None:
    options = {"states": "observation"} if estimator in ("gigpo", "rtmc") else {}
    trainer = make_trainer(estimator, credit=options)
    batch = put_rows(queue, [[1, 3], [2, 1], [1, 1]])
    advantages(trainer, batch)
    found = [queue.rows[key]["advantages"] for key in batch.keys]
    assert all(torch.isfinite(one).all() for one in found) and any(one.any() for one in found)
    assert all(not row[4] for row in found), "the fifth response token is an observation"
    if options:
        trainer.config.algorithm.credit = {}
        with pytest.raises(ValueError, match=r"prompt uid-\d: session \d reports no state"):
            advantages(trainer, put_rows(queue, [[1, 3]]))


def test_one_line_explains_a_step() -> None:
    metrics = {"tree/split_groups": 3.0, "tree/repeated_tokens": 1200.0, "tree/imbalance": 1.04}
    metrics["tree/imbalance_bound"] = 1.02
    update = {"tree/realised_saving": 0.9, "tree/partitions": 6.0, "tree/micro_batches": 4.0, "tree/cost_error": 0.031}
    assert step_metrics.explained_layout(metrics | update, ranks=16, sharing=2) == (
        "layout: 16 ranks of 2 GPUs that share tokens: trees, 90% of the tokens saved; 3 groups split, 1,200 tokens "
        "computed again; slowest rank 1.04 times the mean, 1.02 at best; 6 forwards for 4 micro-batches; predicted "
        "time off by 3.1%"
    )
    one = {"tree/partitions": 1.0, "tree/micro_batches": 1.0}
    said = step_metrics.explained_layout(metrics | update | one, ranks=1, sharing=1)
    assert "; 1 forward for 1 micro-batch; " in said
    whole = {**metrics, "tree/split_groups": 0.0, "tree/realised_saving": 0.0}
    said = "layout: 1 rank: rows; whole groups; slowest rank 1.04 times the mean, 1.02 at best"
    assert step_metrics.explained_layout(whole, ranks=1, sharing=1) == said


def test_a_step_of_several_updates_reports_their_totals() -> None:
    names = ("sessions", "unique_tokens", "flat_tokens", "por", "token_bound", "depth")
    names = [f"tree/{name}" for name in (*names, "paths_per_session/mean", "session_score/mean")]
    updates = [
        dict(zip(names, (count, unique, flat, 1 - unique / flat, flat / unique, *others), strict=True))
        for count, unique, flat, *others in ((8.0, 300.0, 600.0, 9.0, 1.0, 1.0), (24.0, 500.0, 5000.0, 7.0, 3.0, 0.0))
    ]
    totals = (32.0, 800.0, 5600.0, pytest.approx(1 - 800 / 5600), 7.0, 9.0, 2.5, 0.25)
    expected = dict(zip(names, totals, strict=True)) | {"tree/reward_per_1000_trained_tokens": 10.0}
    assert step_metrics.totals_of_updates(updates) == expected


def test_tree_metrics_stand_behind_verls() -> None:
    metrics = {"tree/por": 0.5, "actor/loss": 0.1, "tree/depth": 9.0, "timing_s/step": 2.0}
    step_metrics.put_tree_metrics_last(metrics)
    assert list(metrics) == ["actor/loss", "timing_s/step", "tree/por", "tree/depth"]
