"""Whoever waits for rows learns that nobody makes them any more; whoever is merely busy is left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tree_rl.verl_plugin.resume import liveness
from tree_rl.verl_plugin.resume.liveness import Watch, WorkerDiedError

pytestmark = [pytest.mark.slow, pytest.mark.ray]


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


def test_a_killed_worker_is_named_and_a_busy_one_is_not(worker_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(liveness, "BUSY_SECONDS", 1.0)
    busy, killed = worker_class.remote(), worker_class.remote()
    pid = ray.get([busy.pid.remote(), killed.pid.remote()])[1]
    watch = Watch({"agent loop worker 0": busy, "rollout server 3": killed})
    with watch.guard():
        watch.confirm()
        work = busy.work.remote(600.0)
        watch.confirm()
        watch.check()
        assert not ray.wait([work], timeout=0)[0], "nobody waits for what it does"

        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rollout server 3 died .*trainer\.resume_mode=auto"):
            watch.confirm()
        with pytest.raises(WorkerDiedError, match="rollout server 3 died"):
            while True:
                watch.check()
                time.sleep(0.05)


def test_an_error_of_the_run_is_not_taken_for_a_death(
    worker_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(liveness, "GRACE_SECONDS", threading.TIMEOUT_MAX)
    worker = worker_class.remote()
    pid = ray.get(worker.pid.remote())
    watch = Watch({"rollout server 0": worker})
    with pytest.raises(ValueError, match="a row is wrong"), watch.guard():
        raise ValueError("a row is wrong")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        while True:
            watch.check()
            time.sleep(0.05)
    assert not caplog.records
    killed = worker_class.remote()
    pid = ray.get(killed.pid.remote())
    with pytest.raises(WorkerDiedError, match="rollout server 1 died"), Watch({"rollout server 1": killed}).guard():
        os.kill(pid, signal.SIGKILL)
        ray.get(killed.pid.remote())


HANGING = """
import os, signal, sys, time
import ray
from tree_rl.verl_plugin.resume import liveness
liveness.LOOK_SECONDS, liveness.GRACE_SECONDS = 0.1, 0.5
ray.init(address=sys.argv[1], namespace="hanging", logging_level="error")

@ray.remote(num_cpus=0)
class Worker:
    def pid(self):
        return os.getpid()

worker = Worker.remote()
pid = ray.get(worker.pid.remote())
with liveness.Watch({"storage of the rows' queue 0": worker}).guard():
    os.kill(pid, signal.SIGKILL)
    time.sleep(600)
"""


def test_a_process_that_hangs_on_a_dead_one_is_ended(worker_class: Any) -> None:
    address = ray.get_runtime_context().gcs_address
    ended = subprocess.run([sys.executable, "-c", HANGING, address], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "storage of the rows' queue 0 died" in ended.stderr and "ending the trainer" in ended.stderr
