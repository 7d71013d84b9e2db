"""Attack scripts run by an agent in a software task, with the options a user gets who names none.

The trainer's process here holds what attackers look for: a secret file, a variable, shared memory, sockets, a gateway.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

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


@pytest.fixture
def place(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What lies around in the process that trains. The attacker is told all of it."""
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", SECRET)
    file, path, abstract = open_folder / "checkpoint-secret.txt", open_folder / "trainer.sock", f"test-{os.getpid()}"
    file.write_text(SECRET)
    file.chmod(0o755)
    memory = SharedMemory(create=True, size=64)
    memory.buf[: len(SECRET)] = SECRET.encode()
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in ("0.0.0.0", "127.0.0.1")]
        for address in (f"\0{abstract}", str(path)):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        path.chmod(0o777)
        found = {"file": str(file), "source": __file__, "socket": str(path), "pid": os.getpid()}
        ports, address = [one.getsockname()[1] for one in servers], socket.gethostbyname(socket.gethostname())
        yield {**found, "shared": memory.name, "abstract": abstract, "ports": ports, "address": address}
    memory.close()
    memory.unlink()


async def attack(place: dict[str, Any], options: SandboxOptions | None = None) -> dict[str, str]:
    """What the script found, by name."""
    served = GatewayOptions(max_context_tokens=1000, max_turn_tokens=100)
    async with Gateway(tokenizer=build_tokenizer(), backend=None, options=served) as gateway:
        port = int(gateway.endpoint(gateway.open_session()).url.split(":")[2].split("/")[0])
        told, environment = json.dumps({**place, "ports": [*place["ports"], port]}), SweEnvironment(options)
        try:
            await environment.reset({"swe": TASK.to_row()})
            done = await environment.run(f"cat > attack.py <<'END'\n{SCRIPT}\nEND\npython3 attack.py '{told}'")
            later = await environment.run("test ! -e /etc/ld.so.preload && echo clean")
            assert later.output == "clean\n" and not Path("/etc/ld.so.preload").exists()
        finally:
            await environment.close()
    (line,) = [line for line in done.output.splitlines() if line.startswith("FOUND ")]
    return dict(json.loads(line.removeprefix("FOUND ")))


async def test_files_variables_memory_processes_and_network_of_the_trainer_are_out_of_reach(
    place: dict[str, Any],
) -> None:
    assert await attack(place) == {}


async def test_the_network_is_there_when_the_config_says_so_and_nothing_else_is(place: dict[str, Any]) -> None:
    found = await attack(place, SandboxOptions(limits=Limits(network=True)))
    assert f"port {place['ports'][0]}" in found
    reached = ("port ", "abstract socket", "the machine's address", "another interface", "the host's name service")
    assert not [name for name in found if not name.startswith(reached)]
