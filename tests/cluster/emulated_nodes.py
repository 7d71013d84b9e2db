"""Nodes with addresses of their own on one machine: network namespaces, joined by a cable, each with its own Ray.

Everything started here is found again by its namespace, ended and removed; nothing else is touched.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLUSTER_SCRIPTS = REPOSITORY / "scripts" / "cluster"
PORT = 6379
INTERFACE = "eth0"
START_SECONDS = 120
EXISTING_CLUSTER = ["++ray_kwargs.ray_init.num_cpus=null", "++ray_kwargs.ray_init.num_gpus=null"]
"""verl may not count processors where Ray runs already; scripts/cluster/launch.sh adds the same."""
OWN_PACKAGES = ("tree_rl", "__editable__")
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TZ", "LD_LIBRARY_PATH", "HTTP_PROXY", "HTTPS_PROXY")
"""All that a node and a driver get of the environment of the tests: a node that boots knows nothing of a checkout."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """A running cluster; the first node is the head."""

    namespaces: tuple[str, ...]
    logs: tuple[Path, ...]
    """Output of each node's `ray start`."""
    token: Path
    folder: Path
    """Short-lived files of this cluster."""

    def drive(
        self, command: list[str], *, python: Path, environment: dict[str, str], folder: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a driver on the head, where only this environment and no checkout is known."""
        job = {"RAY_AUTH_MODE": "token", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", **environment}
        variables = node_environment(python, self.token) | {"RAY_ADDRESS": f"{address(0)}:{PORT}"} | job
        full = ["ip", "netns", "exec", self.namespaces[0], "env", "-i", *as_arguments(variables), *command]
        return subprocess.run(full, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)


def why_none() -> str | None:
    """Why this machine emulates no nodes; None if it does."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    name = f"tree{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"ip netns is not permitted: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@contextmanager
def running_nodes(count: int, *, gpus: int, pythons: list[Path] | None = None) -> Iterator[Nodes]:
    """Start one or two nodes that claim to have GPUs, wait until all have joined, and take everything down again."""
    pythons = pythons or [Path(sys.executable)] * count
    namespaces = tuple(f"tree{os.getpid()}n{index}" for index in range(count))
    # Ray's sockets lie in there, and a socket's path may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tn", dir="/tmp"))
    logs = tuple(folder / f"node{index}.log" for index in range(count))
    started: list[subprocess.Popen[bytes]] = []
    try:
        build_network(namespaces)
        for index, (namespace, log, python) in enumerate(zip(namespaces, logs, pythons, strict=True)):
            started.append(start_node(index, namespace, log, python, gpus=gpus, folder=folder))
            wait_until_started(started[-1], log)
        yield Nodes(namespaces=namespaces, logs=logs, token=folder / "token", folder=folder)
    finally:
        take_down(namespaces, started)
        shutil.rmtree(folder, ignore_errors=True)


def build_network(namespaces: tuple[str, ...]) -> None:
    """One namespace per node; two are joined by a virtual cable, as by a switch."""

    def run(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    for namespace in namespaces:
        run(f"netns add {namespace}")
        run(f"-n {namespace} link set lo up")
    first, last = namespaces[0], namespaces[-1]
    # A lone node gets the cable's other end too: an interface is up only if its peer is.
    peer = INTERFACE if last != first else "unused"
    run(f"link add {INTERFACE} netns {first} type veth peer name {peer} netns {last}")
    run(f"-n {last} link set {peer} up")
    for index, namespace in enumerate(namespaces):
        run(f"-n {namespace} addr add {address(index)}/24 dev {INTERFACE}")
        run(f"-n {namespace} link set {INTERFACE} up")


def start_node(
    index: int, namespace: str, log: Path, python: Path, *, gpus: int, folder: Path
) -> subprocess.Popen[bytes]:
    """Start the head (index 0) or a worker node with the scripts that users start them with."""
    variables = node_environment(python, folder / "token") | {"NODE_IP": address(index), "PYTHON": str(python)}
    size = ["--num-cpus=24", f"--num-gpus={gpus}", f"--object-store-memory={400 << 20}"]
    if index == 0:
        variables |= {"RAY_TEMP_DIR": str(folder / "ray"), "DASHBOARD_HOST": address(0)}
        command = ["bash", str(CLUSTER_SCRIPTS / "ray_head.sh"), *size]
    else:
        temporary = f"--temp-dir={folder / f'ray{index}'}"
        command = ["bash", str(CLUSTER_SCRIPTS / "ray_worker.sh"), f"{address(0)}:{PORT}", *size, temporary]
    full = ["ip", "netns", "exec", namespace, "env", "-i", *as_arguments(variables), *command]
    with log.open("wb") as output:
        return subprocess.Popen(full, stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True)


def node_environment(python: Path, token: Path) -> dict[str, str]:
    """What a shell on a fresh node has, with the given Python in front."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    kept["PATH"] = f"{python.parent}:{kept['PATH']}"
    own = {"OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONSAFEPATH": "1"}
    # Left alone, gloo takes the address of the host's name, which all namespaces share: 127.0.0.1.
    return kept | own | {"GLOO_SOCKET_IFNAME": INTERFACE}


def wait_until_started(node: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started." not in log.read_text():
        if node.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a node did not start:\n{log.read_text()}")
        time.sleep(0.2)


def take_down(namespaces: tuple[str, ...], started: list[subprocess.Popen[bytes]]) -> None:
    """End the nodes, last first, then whatever else still runs in the namespaces, then the namespaces."""
    for node in reversed(started):
        node.send_signal(signal.SIGTERM)
    for node in started:
        try:
            node.wait(timeout=30)
        except subprocess.TimeoutExpired:
            node.kill()
    for namespace in namespaces:
        for _ in range(50):
            left = processes_in(namespace)
            if not left:
                break
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def processes_in(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(line) for line in listed.stdout.split()]


def address(index: int) -> str:
    """Address of a node; the head has index 0."""
    return f"10.77.0.{index + 1}"


def as_arguments(variables: dict[str, str]) -> list[str]:
    """NAME=VALUE for `env`."""
    return [f"{name}={value}" for name, value in variables.items()]


def environment_without_us(folder: Path) -> Path:
    """The interpreter of an environment with all packages of this one but tree_rl, neither code nor entry points."""
    venv.create(folder, symlinks=True, with_pip=False)
    ours, theirs = Path(sysconfig.get_path("purelib")), next(folder.glob("lib/python3*/site-packages"))
    for entry in ours.iterdir():
        if not entry.name.startswith(OWN_PACKAGES):
            (theirs / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    ray = (Path(sys.executable).parent / "ray").read_text().splitlines()
    (folder / "bin" / "ray").write_text("\n".join([f"#!{python}", *ray[1:]]) + "\n")
    (folder / "bin" / "ray").chmod(0o755)
    return python


def copy_of_the_code(folder: Path) -> Path:
    """Sources alone, as `working_dir` and `py_modules` carry them."""
    for source in (REPOSITORY / "tree_rl", REPOSITORY / "kernels" / "tree_kernels"):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
