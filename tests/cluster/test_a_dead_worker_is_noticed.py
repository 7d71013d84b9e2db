"""Whoever waits for rows learns that nobody makes them any more; whoever is merely busy is left alone."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tree_rl.verl_plugin.liveness import Watch, WorkerDiedError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def worker_class() -> Iterator[Any]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")

    @ray.remote(num_cpus=0)
    class Worker:
        def pid(self) -> int:
            return os.getpid()

        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    yield Worker
    ray.shutdown()


def test_a_killed_worker_is_named_and_a_busy_one_is_not(worker_class: Any) -> None:
    busy, killed = worker_class.remote(), worker_class.remote()
    pid = ray.get([busy.pid.remote(), killed.pid.remote()])[1]
    watch = Watch({"agent loop worker 0": busy, "rollout server 3": killed})
    watch.confirm()
    watch.look()
    busy.work.remote(60.0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"rollout server 3 died .*trainer\.resume_mode=auto"):
        watch.confirm()

    started = time.monotonic()
    alive = Watch({"agent loop worker 0": busy})
    alive.look()
    alive.confirm()
    assert time.monotonic() - started < 5


def test_a_poll_notices_sooner_or_later_and_never_waits(worker_class: Any) -> None:
    worker = worker_class.remote()
    pid = ray.get(worker.pid.remote())
    watch = Watch({"agent loop worker 1": worker})
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    with pytest.raises(WorkerDiedError, match="agent loop worker 1 died"):
        while time.monotonic() < deadline:
            started = time.monotonic()
            watch.look()
            assert time.monotonic() - started < 1
            time.sleep(0.05)
