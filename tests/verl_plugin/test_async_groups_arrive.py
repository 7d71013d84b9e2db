"""Groups that arrive at different times, drawn by different weights: each trains whole and once; its lag is shown."""

from typing import Any

import numpy as np
import pytest
from local_trainer import LocalQueue, local_queue, make_trainer, put_rows
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from tree_rl.verl_plugin.trainer.step_metrics import staleness_metrics

# Prompt -> sessions -> branches; the weights that drew each prompt's first and later sessions.
BRANCHES = [[1, 3], [2, 1], [1, 1], [4, 1]]
VERSIONS = [(3, 4), (4, 4), (1, 4), (2, 2)]
TRAINER_VERSION = 4


class PollableQueue(LocalQueue):
    """With the calls that verl's replay buffer makes."""

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> PollableQueue:
    local = PollableQueue()
    local_queue(monkeypatch, local)
    rows = put_rows(local, BRANCHES)
    for key in rows.keys:
        uid, session, _ = key.rsplit("_", 2)
        first, later = VERSIONS[int(uid.removeprefix("uid-"))]
        version = first if session == "0" else later
        local.tags[key] |= {"min_global_steps": version, "max_global_steps": version}
    for prompt in range(len(BRANCHES)):
        status(local, prompt, "running")
    return local


def status(queue: PollableQueue, prompt: int, value: str) -> None:
    queue.tags[f"uid-{prompt}"] = {"is_prompt": True, "status": value, "global_steps": prompt}


def async_buffer() -> ReplayBufferAsync:
    return ReplayBufferAsync("colocate_async", {}, 8, "drop", {}, poll_interval=0.01)


def groups_of(batch: KVBatchMeta) -> dict[str, int]:
    found: dict[str, int] = {}
    for key in batch.keys:
        uid = key.rsplit("_", 2)[0]
        found[uid] = found.get(uid, 0) + 1
    return found


def whole(prompt: int) -> int:
    return sum(BRANCHES[prompt])


def test_a_group_is_trained_whole_and_only_when_its_last_session_has_ended(queue: PollableQueue) -> None:
    buffer = async_buffer()
    # All rows of the other prompts lie in the queue already, but their last sessions are still running.
    status(queue, 0, "finished")
    status(queue, 3, "finished")
    first, _ = buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    assert groups_of(first) == {"uid-0": whole(0), "uid-3": whole(3)}
    status(queue, 1, "finished")
    status(queue, 2, "finished")
    second, _ = buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    assert groups_of(second) == {"uid-1": whole(1), "uid-2": whole(2)}


def test_a_batch_of_mixed_versions_keeps_groups_in_one_mini_batch_and_reports_its_lag(queue: PollableQueue) -> None:
    for prompt in range(len(BRANCHES)):
        status(queue, prompt, "finished")
    batch, _ = async_buffer().sample(global_steps=TRAINER_VERSION + 1, partition_id="train", batch_size=4)
    trainer, metrics = make_trainer(), {}
    balanced = trainer._balance_batch(batch, metrics)
    # One rank after the other, each with all mini-batches in order.
    of_rank = len(balanced) // 2
    block = of_rank // trainer._steps[0]
    homes: dict[str, set[int]] = {}
    for row, (key, tag) in enumerate(zip(balanced.keys, balanced.tags, strict=True)):
        if not tag.get("is_padding", False):
            homes.setdefault(key.rsplit("_", 2)[0], set()).add(row % of_rank // block)
    assert len(homes) == len(BRANCHES) and all(len(places) == 1 for places in homes.values())
    versions = [
        v
        for branches, pair in zip(BRANCHES, VERSIONS, strict=True)
        for n, v in zip(branches, pair, strict=True)
        for _ in range(n)
    ]
    lags = [TRAINER_VERSION - version for version in versions]
    assert metrics["tree/staleness/oldest/mean"] == pytest.approx(sum(lags) / len(lags))
    assert metrics["tree/staleness/oldest/max"] == max(lags) == 3
    assert metrics["tree/mixed_version_trees"] == 2 / 4
    assert metrics["tree/mixed_version_rows"] == 0


def test_lags_count_from_the_oldest_and_newest_version_of_rows_that_have_one() -> None:
    spans = [(3, 3), (1, 3), (2, 2), (4, 4), (None, None)]
    tags = [{"min_global_steps": low, "max_global_steps": high} for low, high in spans]
    figures = staleness_metrics(tags, np.array([0, 0, 1, 2, 2]), trainer_version=4)
    assert figures["tree/staleness/oldest/mean"] == (1 + 3 + 2 + 0) / 4
    assert figures["tree/staleness/newest/mean"] == (1 + 1 + 2 + 0) / 4
    assert (figures["tree/staleness/oldest/max"], figures["tree/staleness/newest/max"]) == (3, 2)
    # Group 0 has rows of several versions, one of which was continued.
    assert (figures["tree/mixed_version_rows"], figures["tree/mixed_version_trees"]) == (1 / 4, 1 / 3)
    assert staleness_metrics([{}, tags[-1]], np.array([0, 0]), trainer_version=4) == {}


def test_a_group_too_stale_leaves_whole_and_is_replaced(queue: PollableQueue) -> None:
    refilled: list[int] = []
    buffer = ReplayBufferAsync("colocate_async", {}, 4, "drop", {}, poll_interval=0.01, refill_fn=refilled.append)
    for prompt in range(len(BRANCHES)):
        status(queue, prompt, "finished")
    batch, metrics = buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    # Prompts of steps 0 and 1 span more than four versions at step 5.
    assert groups_of(batch) == {"uid-2": whole(2), "uid-3": whole(3)}
    assert refilled == [2]
    assert not [key for key in queue.rows if key.startswith(("uid-0_", "uid-1_"))]
    assert metrics["training/off_policy/evicted_samples"] == 2
