"""A GRPO job of verl's main_ppo that tests kill: its config, its processes, what it leaves behind.

A run has a folder, and its processes are those that run in it: whoever reads or kills here never touches another one.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import toy_qwen

from tree_rl.verl_plugin.resume.update_ledger import LEDGER

STEPS = 20
SAVE_FREQ = 2
PROMPTS = 20
"""Five steps of four prompts are an epoch, so the data are shuffled anew within a run."""

ENVIRONMENT = """
from tree_rl.rollout.environments import ShellEnvironment
from tree_rl.rollout.sandbox.sandbox import SandboxOptions


class WorkingEnvironment(ShellEnvironment):
    def __init__(self):
        super().__init__(SandboxOptions(unconfined=True))

    async def reset(self, task):
        await super().reset(task)
        await self.sandbox.run("sleep 0.4; echo started > progress")

    async def score(self, outcome):
        return float(len(outcome.answer) % 2)
"""
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray's own that run none of the job's code."""
FIGURES = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/ppo_kl", "actor/lr", "tree/por")


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a job."""

    pid: int
    parent: int
    title: str


def start(folder: Path, log: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    with log.open("w") as stream:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *config(folder), *overrides]
        given = {"env": environment(folder), "cwd": folder, "start_new_session": True}
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, **given)


def environment(folder: Path) -> dict[str, str]:
    """Of every process of the run; temporary files, sandboxes among them, go below the folder."""
    (folder / "tmp").mkdir(exist_ok=True)
    # Paths of sockets must be short.
    return toy_qwen.job_environment(folder, RAY_TMPDIR="/tmp", TMPDIR=str(folder / "tmp"))


def processes_in(folder: Path) -> list[Process]:
    """Living processes whose working directory is the folder of the run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "cwd").readlink() != folder:
                continue
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if title:  # a zombie has none
            found.append(Process(pid=int(entry.name), parent=parent, title=title))
    return found


def wait_until_none(folder: Path, seconds: float, besides: tuple[str, ...] = ()) -> list[Process]:
    """Wait for the end of the run's processes, those besides whose titles start so; what is left after the time."""

    def left() -> list[Process]:
        return [process for process in processes_in(folder) if not process.title.startswith(besides)]

    deadline = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def shared_memory_of(processes: list[Process]) -> set[Path]:
    """Files below /dev/shm that they have mapped or open."""
    paths = set()
    for process in processes:
        place = Path("/proc", str(process.pid))
        try:
            lines = (place / "maps").read_text().splitlines()
            names = [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line]
            names += [str(link.readlink()) for link in (place / "fd").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        paths |= {Path(name.removesuffix(" (deleted)")) for name in names if name.startswith("/dev/shm/")}
    return paths


def sandboxes(folder: Path) -> set[str]:
    """Folders of sandboxes, whether their owner lives or not."""
    return {path.name for path in (folder / "tmp").glob("tree-rl-owned-sandbox-*")}


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "working_environment.py").write_text(ENVIRONMENT)
    toy_qwen.save_model(folder / "model")
    texts = [f"say {number}" for number in range(PROMPTS)]
    toy_qwen.save_prompts(folder / "prompts.parquet", texts, agent_name="tree_tool_agent")
    toy_qwen.save_reward(folder / "reward.py")


def config(folder: Path) -> list[str]:
    """Overrides of the run, whoever starts it."""
    files = (f"{folder}/{name}" for name in ("model", "prompts.parquet", "reward.py"))
    return [
        *toy_qwen.ppo_overrides(*files, folder / "out"),
        "+actor_rollout_ref.rollout.custom.tree_agent.environment=working_environment.WorkingEnvironment",
        f"+actor_rollout_ref.rollout.custom.tree_dump_dir={folder / 'trees'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        # Measured times would decide which groups the ranks split.
        "actor_rollout_ref.actor.fsdp_config.full_determinism=true",
        *toy_qwen.under("trainer", "v1.trainer_mode=tree_sync", "resume_mode=auto", f"save_freq={SAVE_FREQ}"),
        f"trainer.total_training_steps={STEPS}",
        "data.seed=1",
    ]


ONE_NODE = ["+ray_kwargs.ray_init.num_gpus=2", "trainer.n_gpus_per_node=2"]


def two_nodes(address: str) -> list[str]:
    """Overrides for the same two ranks on two nodes of a cluster that runs already."""
    joined = [f"+ray_kwargs.ray_init.address={address}", "ray_kwargs.ray_init.num_cpus=null"]
    return [*joined, "trainer.n_gpus_per_node=1", "trainer.nnodes=2"]


def figures_of_steps(log: str) -> dict[int, dict[str, float]]:
    """The console's figures of every step."""
    return {int(step["step"]): {name: step[name] for name in FIGURES} for step in toy_qwen.read_metrics(log)}


def read_ledger(root: Path) -> list[dict[str, int | str]]:
    """The ledger in `trainer.default_local_dir`, in the order of the updates."""
    path = root / LEDGER
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
