"""A GRPO job of verl's main_ppo that tests kill: its config, its processes, what it leaves behind.

Every process of a job is found by one environment variable that only this job has; no other process is ever touched.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import toy_qwen

TOKEN = "TREE_RL_JOB_UNDER_TEST"
STEPS = 12
SAVE_FREQ = 2
PROMPTS = 20
"""Five steps of four prompts are an epoch, so the data are shuffled anew within a run."""

ENVIRONMENT = """
from tree_rl.rollout.environment import ShellEnvironment


class WorkingEnvironment(ShellEnvironment):
    async def reset(self, task):
        await super().reset(task)
        await self._workspace.run_async("sleep 0.4; echo started > progress")

    async def score(self, outcome):
        return float(len(outcome.answer) % 2)
"""
FIGURES = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/ppo_kl", "actor/lr", "tree/por")
SYSTEM = ("raylet", "gcs_server", "ray::", "main_ppo", "tree_rl", "verl")


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a job."""

    pid: int
    parent: int
    title: str


@dataclass(kw_only=True)
class Job:
    """One start of main_ppo.

    Args:
        folder: where model, data and the run's directory `out` are; shared by all starts of a run.
        overrides: added to the config.
        token: marks the processes; a cluster that the job joins has its own.
    """

    folder: Path
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: token_hex(8))

    def start(self, log: Path) -> None:
        """Start it; the log is a file."""
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]),
            "RAY_AUTH_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "TMPDIR": str(temporary_folder(self.folder)),
            TOKEN: self.token,
            **self.environment,
        }
        with log.open("w") as stream:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "verl.trainer.main_ppo", *config(self.folder), *self.overrides],
                env=environment,
                cwd=self.folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[Process]:
        """Its processes that live."""
        return processes_with(self.token)

    def kill(self, process: Process) -> None:
        """kill -9."""
        os.kill(process.pid, signal.SIGKILL)

    def end(self, timeout: float) -> int:
        """Wait for the driver's exit status."""
        return self.driver.wait(timeout=timeout)


def temporary_folder(folder: Path) -> Path:
    """Where the job's processes put temporary files, workspaces among them."""
    path = folder / "tmp"
    path.mkdir(exist_ok=True)
    return path


def processes_with(token: str) -> list[Process]:
    """Living processes whose environment carries the token."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if title:  # a zombie has none
            found.append(Process(pid=int(entry.name), parent=parent, title=title))
    return found


def wait_until_none(token: str, seconds: float) -> list[Process]:
    """Wait for the end of all processes with the token; what is left after the time."""
    deadline = time.monotonic() + seconds
    while (left := processes_with(token)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def prepare(folder: Path) -> None:
    """Write model, data, reward and environment of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "working_environment.py").write_text(ENVIRONMENT)
    toy_qwen.save_model(folder / "model")
    toy_qwen.save_prompts(
        folder / "prompts.parquet", [f"say {i}" for i in range(PROMPTS)], agent_name="tree_tool_agent"
    )
    toy_qwen.save_reward(folder / "reward.py")


def config(folder: Path) -> list[str]:
    """Overrides of the run, whoever starts it."""
    return [
        *toy_qwen.ppo_overrides(
            str(folder / "model"), str(folder / "prompts.parquet"), str(folder / "reward.py"), folder / "out"
        ),
        "+actor_rollout_ref.rollout.custom.tree_agent.environment=working_environment.WorkingEnvironment",
        f"+actor_rollout_ref.rollout.custom.tree_dump_dir={folder / 'trees'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.v1.trainer_mode=tree_sync",
        "trainer.resume_mode=auto",
        f"trainer.save_freq={SAVE_FREQ}",
        f"trainer.total_training_steps={STEPS}",
        "data.seed=1",
    ]


ONE_NODE = ["+ray_kwargs.ray_init.num_gpus=2", "trainer.n_gpus_per_node=2"]


def figures_of_steps(log: str) -> dict[int, dict[str, str]]:
    """The console's figures of every step, as printed."""
    steps = {}
    for line in log.splitlines():
        match = re.search(r"\bstep:(\d+) - ", line)
        if match:
            printed = dict(re.findall(r"([\w/]+):(?:np\.\w+\()?(-?[\d.e+-]+)", line))
            steps[int(match[1])] = {name: printed[name] for name in FIGURES}
    return steps
