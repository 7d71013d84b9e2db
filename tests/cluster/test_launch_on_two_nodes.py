"""Two Ray nodes of this machine, started by the scripts with token authentication, checked, used and stopped again."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from live_processes import command_lines, wait_for

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/cluster"
ADDRESS = ray.util.get_node_ip_address()
START = ("--num-cpus", "12", "--num-gpus", "1", "--object-store-memory", "200000000")
FAKE_VERSION = "5.99.0"
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    folder: Path
    head: str
    dashboard: str
    processes: dict[str, subprocess.Popen[bytes]]

    def environment(self, **variables: str) -> dict[str, str]:
        # PYTHONPATH would travel with the driver, over that of the node whose packages are to differ.
        strange = ("RAY_", "PYTEST", "PYTHONPATH")
        own = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        own |= {"PYTHON": sys.executable, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        return own | {"RAY_AUTH_TOKEN_PATH": str(self.folder / "token"), "WAIT_SECONDS": "120"} | variables

    def start(self, name: str, script: str, *arguments: str, **variables: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                ["bash", str(SCRIPTS / script), *arguments], env=self.environment(**variables), stdout=log, stderr=log
            )

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)

    def run(
        self, script: str, *arguments: str, seconds: int = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**{"RAY_ADDRESS": self.head, "DASHBOARD": self.dashboard, **variables})
        given = {"env": environment, "cwd": self.folder, "timeout": seconds}
        return subprocess.run(["bash", str(SCRIPTS / script), *arguments], capture_output=True, text=True, **given)

    def left_over(self) -> list[str]:
        """Command lines of Ray's processes that belong to this cluster."""
        return [line for line in command_lines() if str(self.folder / "ray") in line or self.head in line]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="tr_", dir="/tmp"))  # short: Ray's sockets lie in it
    port, dashboard_port = free_ports(2)
    dashboard = f"http://127.0.0.1:{dashboard_port}"
    cluster = Cluster(folder=folder, head=f"{ADDRESS}:{port}", dashboard=dashboard, processes={})
    try:
        ports = {"HEAD_PORT": str(port), "DASHBOARD_PORT": str(dashboard_port)}
        cluster.start("head", "ray_head.sh", *START, **ports, RAY_TEMP_DIR=f"{folder}/ray")
        wait_for((folder / "token").exists, 300)
        cluster.start("worker", "ray_worker.sh", cluster.head, *START, NODE_IP="127.0.0.2")
        yield cluster
    finally:
        for name in list(cluster.processes):
            cluster.stop(name)
        shutil.rmtree(folder)


def test_launch_checks_both_nodes_and_runs_the_command(cluster: Cluster) -> None:
    done = cluster.run("launch.sh", "2", "--", sys.executable, "-c", "import os; print('nodes', os.environ['NNODES'])")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"node {ADDRESS}" in done.stdout and "node 127.0.0.2" in done.stdout
    assert f"dashboard  {cluster.dashboard}" in done.stdout
    assert f"logs       {cluster.folder}/ray/session_" in done.stdout
    assert done.stdout.endswith("nodes 2\n")
    assert (cluster.folder / "token").stat().st_mode & 0o777 == 0o600


def test_submitted_job_runs_there_and_its_failure_is_the_scripts(cluster: Cluster) -> None:
    done = cluster.run("submit.sh", "2", "--", "env", "GREETING=a b", "bash", "-c", 'echo "$GREETING on $NNODES"')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a b on 2\n" in done.stdout
    failed = cluster.run("submit.sh", "2", "--", "bash", "-c", "exit 3")
    assert failed.returncode != 0


def test_cluster_refuses_who_has_another_token(cluster: Cluster) -> None:
    refused = cluster.run("launch.sh", "2", "--", "touch", "ran", RAY_AUTH_TOKEN="another")
    assert refused.returncode != 0
    assert "token" in refused.stderr
    assert not (cluster.folder / "ran").exists()


def test_missing_node_is_counted(cluster: Cluster) -> None:
    refused = cluster.run("launch.sh", "3", "--", "touch", "ran", WAIT_SECONDS="3")
    assert refused.returncode == 1
    assert "2 of 3 nodes are alive after 3 s" in refused.stderr
    assert not (cluster.folder / "ran").exists()


def test_node_with_another_version_is_named_and_nothing_runs(cluster: Cluster) -> None:
    fake = cluster.folder / f"fake/transformers-{FAKE_VERSION}.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {FAKE_VERSION}\n")
    cluster.start("odd", "ray_worker.sh", cluster.head, *START, NODE_IP="127.0.0.3", PYTHONPATH=str(fake.parent))
    try:
        refused = cluster.run("launch.sh", "3", "--", "touch", "ran")
    finally:
        cluster.stop("odd")
    assert refused.returncode == 1
    assert "1 failed: node 127.0.0.3" in refused.stderr
    assert f"transformers {FAKE_VERSION} (here " in refused.stdout
    assert not (cluster.folder / "ran").exists()
    wait_for(lambda: "127.0.0.3" not in alive_nodes(cluster), 300)


def test_sft_starts_a_process_on_both_nodes(cluster: Cluster) -> None:
    for script, target in (("tiny_model.py", "model"), ("toy_task.py", "data")):
        command = [sys.executable, str(ROOT / "recipes" / script), str(cluster.folder / target)]
        subprocess.run(command, env=cluster.environment(), check=True, capture_output=True, timeout=120)
    given = [f"MODEL_PATH={cluster.folder}/model", f"TRAIN_FILE={cluster.folder}/data/sft.parquet", "EPOCHS=1"]
    given += [f"OUTPUT={cluster.folder}/sft", f"MASTER_PORT={free_ports(1)[0]}", "DEVICE=cpu"]
    recipe = str(ROOT / "recipes/sft/run_qwen3_fsdp2.sh")
    done = cluster.run(
        "launch.sh", "2", "--", "env", *given, "bash", recipe, "trainer.total_training_steps=2", seconds=600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "ip=127.0.0.2" in done.stdout, done.stdout[-6000:]


def test_signal_stops_a_node_and_leaves_nothing(cluster: Cluster) -> None:
    assert cluster.left_over()
    cluster.stop("worker")
    wait_for(lambda: "127.0.0.2" not in alive_nodes(cluster), 300)
    cluster.stop("head")
    wait_for(lambda: not cluster.left_over(), 300)


def alive_nodes(cluster: Cluster) -> str:
    ask = "import ray, sys; ray.init(sys.argv[1]); print([n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']])"
    environment = cluster.environment(RAY_AUTH_MODE="token")
    command = [sys.executable, "-c", ask, cluster.head]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
