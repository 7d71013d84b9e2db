"""Attack scripts run by an agent in a software task, with the options a user gets who names none.

The trainer's process here holds what attackers look for: a secret file, a variable, shared memory, sockets, a gateway.
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from gateway_harness import build_tokenizer
from sandboxes_here import needs_bubblewrap
from small_swe import all_tasks

from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import SandboxOptions

SECRET = "trainers-secret"
TASK = all_tasks()["lru_cache"]
pytestmark = needs_bubblewrap

SCRIPT = """
import ctypes, glob, json, os, signal, socket, sys
place = json.loads(sys.argv[1])
SECRET = "-".join(["trainers", "secret"])  # the script's own text must not contain it
found = []

def attempt(name, act):
    try:
        result = act()
        if result:
            found.append([name, str(result)[:200]])
    except (Exception, SystemExit):
        pass

def read(path):
    with open(path, "rb") as file:
        text = file.read(1 << 20)
    return text if SECRET.encode() in text else None

def write(path):
    with open(path, "w") as file:
        file.write("owned")
    return path

def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(1)
        client.connect(address)
        return address

attempt("the secret file", lambda: read(place["file"]))
attempt("the repository", lambda: open(place["source"]).read())
attempt("through a link", lambda: (os.symlink(place["file"], "link"), read("link"))[1])
attempt("the trainer's folder", lambda: os.listdir(os.path.dirname(place["file"])))
attempt("own variables", lambda: SECRET in str(dict(os.environ)))
for pid in {str(place["pid"]), "1", str(os.getppid()), *(p for p in os.listdir("/proc") if p.isdigit())}:
    for part in ("environ", "cmdline", "maps"):
        attempt(f"/proc/{pid}/{part}", lambda: read(f"/proc/{pid}/{part}"))
    attempt(f"/proc/{pid}/root", lambda: read(f"/proc/{pid}/root{place['file']}"))
    attempt(f"/proc/{pid}/cwd", lambda: [f for f in os.listdir(f"/proc/{pid}/cwd") if f == "pyproject.toml"])
    for link in glob.glob(f"/proc/{pid}/fd/*"):
        attempt(link, lambda: read(link))
attempt("a signal to the trainer", lambda: os.kill(place["pid"], 0) or "delivered")
libc = ctypes.CDLL(None, use_errno=True)
attempt("ptrace", lambda: libc.ptrace(16, place["pid"], 0, 0) == 0)
attempt("shared memory by name", lambda: read("/dev/shm/" + place["shared"]))
attempt("shared memory listed", lambda: [name for name in glob.glob("/dev/shm/*") if place["shared"] in name])
for port in place["ports"]:
    attempt(f"port {port}", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
    attempt(f"port {port}, IPv6", lambda: connect(socket.AF_INET6, ("::1", port)))
attempt("abstract socket", lambda: connect(socket.AF_UNIX, chr(0) + place["abstract"]))
attempt("socket file", lambda: connect(socket.AF_UNIX, place["socket"]))
attempt("the machine's address", lambda: connect(socket.AF_INET, (place["address"], place["ports"][0])))
attempt("another interface", lambda: [name for _, name in socket.if_nameindex() if name != "lo"])
for path in ("/etc/passwd", "/usr/bin/env", "/proc/sys/kernel/core_pattern", place["file"]):
    attempt(f"writing {path}", lambda: write(path))
    attempt(f"owning {path}", lambda: os.chmod(path, 0o777) or path)
for device in ("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/nvidia0", "/dev/fuse"):
    attempt(device, lambda: open(device, "rb").read(1) or device)
for group in glob.glob("/sys/fs/cgroup/*/release_agent") + glob.glob("/sys/fs/cgroup/cgroup.procs"):
    attempt(group, lambda: write(group))
attempt("mounting", lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0)
attempt("chroot", lambda: os.chroot("/proc/1/root") or read(place["file"]))
attempt("becoming root", lambda: (os.setuid(0), read("/etc/shadow") or open("/etc/shadow").read())[1])
attempt("the host's name service", lambda: socket.gethostbyname("example.com"))
attempt("a library for later commands", lambda: write("/etc/ld.so.preload") and None)
print("FOUND " + json.dumps(found))
"""


class Trainer:
    """What lies around in the process that trains."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "checkpoint-secret.txt"
        self.file.write_text(SECRET)
        self.file.chmod(0o755)
        self.memory = SharedMemory(create=True, size=64)
        self.memory.buf[: len(SECRET)] = SECRET.encode()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.everywhere = socket.create_server(("0.0.0.0", 0))
        self.abstract, self.path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0tree-rl-test-{os.getpid()}")
        self.abstract.listen()
        self.path.bind(str(folder / "trainer.sock"))
        self.path.listen()
        (folder / "trainer.sock").chmod(0o777)

    def place(self, gateway_port: int) -> str:
        """What the attacker is told, which is everything."""
        return json.dumps(
            {
                "file": str(self.file),
                "source": str(Path(__file__)),
                "pid": os.getpid(),
                "shared": self.memory.name,
                "ports": [self.everywhere.getsockname()[1], self.server.getsockname()[1], gateway_port],
                "abstract": f"tree-rl-test-{os.getpid()}",
                "socket": self.path.getsockname(),
                "address": socket.gethostbyname(socket.gethostname()),
            }
        )

    def close(self) -> None:
        for made in (self.server, self.everywhere, self.abstract, self.path):
            made.close()
        self.memory.close()
        self.memory.unlink()


@pytest.fixture
def trainer(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", SECRET)
    made = Trainer(open_folder)
    yield made
    made.close()


def attack(trainer: Trainer, options: SandboxOptions | None = None) -> dict[str, str]:
    """What the script found, by name."""

    async def run() -> str:
        served = GatewayOptions(max_context_tokens=1000, max_turn_tokens=100)
        async with Gateway(tokenizer=build_tokenizer(), backend=None, options=served) as gateway:
            url = gateway.endpoint(gateway.open_session()).url
            environment = SweEnvironment(options)
            try:
                await environment.reset({"swe": TASK.to_row()})
                place = trainer.place(int(url.split(":")[2].split("/")[0]))
                done = await environment.run(f"cat > attack.py <<'END'\n{SCRIPT}\nEND\npython3 attack.py '{place}'")
                later = await environment.run("test ! -e /etc/ld.so.preload && echo clean")
                assert later.output == "clean\n" and not Path("/etc/ld.so.preload").exists()
            finally:
                await environment.close()
            return done.output

    lines = [line for line in asyncio.run(run()).splitlines() if line.startswith("FOUND ")]
    assert len(lines) == 1, "the script ran to its end"
    return dict(json.loads(lines[0].removeprefix("FOUND ")))


def test_files_variables_memory_processes_and_network_of_the_trainer_are_out_of_reach(trainer: Trainer) -> None:
    assert attack(trainer) == {}


def test_the_network_is_there_when_the_config_says_so_and_nothing_else_is(trainer: Trainer) -> None:
    found = attack(trainer, SandboxOptions(limits=Limits(network=True)))
    port = json.loads(trainer.place(0))["ports"][0]
    assert f"port {port}" in found
    reached = ("port ", "abstract socket", "the machine's address", "another interface", "the host's name service")
    assert not [name for name in found if not name.startswith(reached)]
