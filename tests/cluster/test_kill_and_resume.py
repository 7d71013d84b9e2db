"""Kill -9 of anything, at any point, ten times in one run: it ends up where a run ends up that nobody kills.

Takes about half an hour on two cores; `TREE_RL_CHAOS_DIR=<folder>` keeps the runs, so that the tests can be called one
by one, in order. See docs/cluster.md, "Resume after a failure".
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import job
import live_processes
import pytest
import torch

from tree_rl.verl_plugin.resume.checkpoint_record import RECORD, read_record
from tree_rl.verl_plugin.resume.file_marks import why_damaged

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

KILLS = 10
SEED = 20
VICTIMS = {
    "driver": "main_ppo",
    "trainer": "ray::TaskRunner",
    "training worker": "WorkerDict",
    "rollout server": "ray::HFServer",
    "agent loop worker": "ray::TreeAgentLoop",
    "node": "raylet",
}
"""What is killed -> what its title contains."""
PHASES = ("rollout", "update", "checkpoint")
NAMED = ("died", "ActorDiedError", "ActorUnavailableError")
"""What the log of a job that lost a process says."""

AGENTS_SECONDS = 90.0
"""How long Ray's own agents may outlive the rest of the job. Where the cluster died with its driver, they first try for
60 s to report it to the dead cluster (`publish_error_to_driver`, ray/_private/utils.py of 2.60); 30 s are for them to
end on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill."""

    victim: str
    phase: str
    steps: int
    """Which step after the checkpoint."""
    delay: float
    """Part of the phase that passes before."""


def planned_kills() -> list[Kill]:
    """Every victim, then more at random, each in a random phase."""
    dice = random.Random(SEED)
    victims = dice.sample(list(VICTIMS), len(VICTIMS)) + dice.choices(list(VICTIMS), k=KILLS - len(VICTIMS))
    phases = dice.sample(PHASES * (KILLS // len(PHASES) + 1), KILLS)
    return [
        Kill(victim=victim, phase=phase, steps=dice.choice((1, 2, 3)), delay=dice.random())
        for victim, phase in zip(victims, phases, strict=True)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("TREE_RL_CHAOS_DIR")
    return Path(kept) if kept else tmp_path_factory.mktemp("chaos")


def folder_of(runs: Path, name: str) -> Path:
    folder = runs / name
    if not folder.exists():
        job.prepare(folder)
    return folder


def next_log(folder: Path) -> Path:
    return folder / f"log{len(list(folder.glob('log*.txt'))):02}.txt"


def checkpointed_step(folder: Path) -> int:
    """The newest whole checkpoint."""
    folders = (folder / "out").glob("global_step_*")
    return max((int(path.name.split("_")[-1]) for path in folders if is_whole(path)), default=0)


def is_whole(folder: Path) -> bool:
    """Whether all files of a checkpoint are what was saved."""
    record = read_record(folder)
    return record is not None and record.is_whole and why_damaged(folder, record.files) is None


def trained_step(folder: Path) -> int:
    """The last step in the ledger, whose end may be half a line."""
    path = folder / "out" / "updates.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a moment of a job that runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the job ended by itself"
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.005)


def in_phase(folder: Path, kill: Kill, step: int) -> Callable[[], bool]:
    """Whether the job is in the phase of a step, in a rollout also of a later one: steps may end between two looks."""

    def rollout() -> bool:
        return trained_step(folder) >= step - 1 and bool(job.sandboxes(folder))

    def update() -> bool:
        texts = [path.read_text() for path in (folder / "trees").glob(f"train-step{step:06}-*.jsonl")]
        groups = {line.split('"session"')[0] for text in texts for line in text.splitlines()}
        return len(groups) == 4 and trained_step(folder) == step - 1

    def checkpoint() -> bool:
        # A step without one has the next step's.
        saved = -(-step // job.SAVE_FREQ) * job.SAVE_FREQ
        record = folder / "out" / f"global_step_{saved}" / RECORD
        return record.exists() and not json.loads(record.read_text())["is_whole"]

    return {"rollout": rollout, "update": update, "checkpoint": checkpoint}[kill.phase]


PHASE_SECONDS = {"rollout": 0.5, "update": 2.0, "checkpoint": 0.1}


def victims_of(folder: Path, kill: Kill, raylets: list[int]) -> list[int]:
    """Process ids to kill at once: one process, or all of a node."""
    processes = job.processes_in(folder)
    if kill.victim == "node":
        return [raylets[1], *(process.pid for process in processes if process.parent == raylets[1])]
    matching = [process.pid for process in processes if VICTIMS[kill.victim] in process.title]
    assert matching, f"no {kill.victim} among {[process.title for process in processes]}"
    return [min(matching)]


def started_cluster(folder: Path) -> tuple[subprocess.Popen[str], list[str], list[int]]:
    """Two nodes, and how the job joins them."""
    program = [sys.executable, str(Path(__file__).with_name("two_nodes.py"))]
    cluster = subprocess.Popen(
        program, cwd=folder, env=job.environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdout is not None
    line = next(line for line in cluster.stdout if line.startswith("{"))
    nodes = json.loads(line)
    return cluster, job.two_nodes(nodes["address"]), nodes["raylets"]


def live_and_be_killed(folder: Path, kill: Kill) -> dict[str, Any]:
    """Start the job, kill, and see that it ends and leaves nothing; what happened."""
    left_before = job.sandboxes(folder)
    since = checkpointed_step(folder)
    step = min(since + kill.steps, job.STEPS - 1)
    cluster, overrides, raylets = started_cluster(folder) if kill.victim == "node" else (None, job.ONE_NODE, [])
    log = next_log(folder)
    driver = job.start(folder, log, overrides)
    try:
        # An uninterrupted life ends long before; the start alone takes a minute and more.
        wait_for(lambda: trained_step(folder) >= step - 1 and "Training Progress" in log.read_text(), driver, 400)
        shared = job.shared_memory_of(job.processes_in(folder))
        victims = victims_of(folder, kill, raylets)
        wait_for(in_phase(folder, kill, step), driver, 120)
        time.sleep(kill.delay * PHASE_SECONDS[kill.phase])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        assert not left_before & job.sandboxes(folder), "sandboxes of the dead are still there"
        status = driver.wait(timeout=120)
        seconds = time.monotonic() - killed
        if cluster is not None:
            live_processes.wait_for(lambda: not workers_of_job(folder), 90)
            cluster.communicate(input="", timeout=60)
        left = job.wait_until_none(folder, 60, besides=job.RAY_AGENTS)
        assert left == [], left
        left = job.wait_until_none(folder, AGENTS_SECONDS)
        assert left == [], left
        until_none = time.monotonic() - killed
        assert status != 0
        assert kill.victim == "driver" or any(name in log.read_text() for name in NAMED), log.read_text()[-3000:]
        assert not [path for path in shared if path.exists()]
    finally:
        for process in job.processes_in(folder):
            os.kill(process.pid, signal.SIGKILL)
    reached = {"trained": trained_step(folder), "checkpointed": checkpointed_step(folder), "log": log.name}
    ended = {"seconds_to_end": round(seconds, 1), "seconds_until_nothing_is_left": round(until_none, 1)}
    killed_at = {"victim": kill.victim, "phase": kill.phase, "since": since, "step": step}
    return {**killed_at, "status": status, **reached, **ended}


def workers_of_job(folder: Path) -> list[str]:
    """Ray processes of a job, those of the cluster itself left out."""
    own = ("ray::IDLE", *job.RAY_AGENTS)
    titles = [process.title for process in job.processes_in(folder)]
    return [title for title in titles if title.startswith("ray::") and not title.startswith(own)]


def finish(folder: Path) -> None:
    """Run the job to its end, unless it has ended."""
    if checkpointed_step(folder) < job.STEPS:
        log = next_log(folder)
        status = job.start(folder, log, job.ONE_NODE).wait(timeout=800)
        assert status == 0, log.read_text()[-6000:]
        assert job.wait_until_none(folder, 60) == []


def test_an_uninterrupted_run_trains_every_prompt_once_an_epoch(runs: Path) -> None:
    folder = folder_of(runs, "uninterrupted")
    finish(folder)
    trained = job.read_ledger(folder / "out")
    assert Counter(group["step"] for group in trained) == dict.fromkeys(range(1, job.STEPS + 1), 4)
    for epoch in range(job.STEPS // 5):
        assert sorted(g["index"] for g in trained if (g["step"] - 1) // 5 == epoch) == list(range(job.PROMPTS))


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_job_ends_with_a_named_error_and_leaves_nothing(runs: Path, number: int) -> None:
    folder = folder_of(runs, "killed")
    history = folder / "history.jsonl"
    done = len(history.read_text().splitlines()) if history.exists() else 0
    if number < done:
        pytest.skip("done before, see history.jsonl")
    assert number == done, "kills are done in order"
    happened = live_and_be_killed(folder, planned_kills()[number])
    with history.open("a") as stream:
        stream.write(json.dumps(happened) + "\n")


def test_the_killed_run_did_what_the_uninterrupted_one_did(runs: Path) -> None:
    whole, killed = folder_of(runs, "uninterrupted"), folder_of(runs, "killed")
    finish(killed)
    # Every row that trained the weights, its tokens included, once and in the same update.
    assert job.read_ledger(killed / "out") == job.read_ledger(whole / "out")
    (log,) = whole.glob("log*.txt")
    expected = job.figures_of_steps(log.read_text())
    logs = [job.figures_of_steps(log.read_text()) for log in sorted(killed.glob("log*.txt"))]
    assert set(expected) == set(range(1, job.STEPS + 1))
    for figures in logs:
        assert figures == {step: expected[step] for step in figures}
    assert {step for figures in logs for step in figures} >= {job.STEPS}
    for step in range(job.SAVE_FREQ, job.STEPS + 1, job.SAVE_FREQ):
        for kind in ("model", "optim"):
            for rank in range(2):
                name = f"out/global_step_{step}/actor/{kind}_world_size_2_rank_{rank}.pt"
                assert_equal(load(killed / name), load(whole / name), f"{name}")
    assert job.sandboxes(killed) == set()
    rows = [path.read_text() for path in (killed / "trees").glob("train-*.jsonl")]
    written = [json.loads(line) for text in rows for line in text.splitlines()]
    keys = [(row["step"], row["uid"], row["session"], row["index"]) for row in written]
    assert len(keys) == len(set(keys))


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def assert_equal(got: Any, expected: Any, place: str) -> None:
    """Bit for bit."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), place
        for key in expected:
            assert_equal(got[key], expected[key], f"{place}:{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), place
        for index, (left, right) in enumerate(zip(got, expected, strict=True)):
            assert_equal(left, right, f"{place}[{index}]")
    elif isinstance(expected, torch.Tensor):
        left, right = (getattr(tensor, "_local_tensor", tensor) for tensor in (got, expected))
        assert torch.equal(left, right), place
    else:
        assert got == expected, place
