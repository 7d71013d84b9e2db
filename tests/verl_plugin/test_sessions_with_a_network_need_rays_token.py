"""A session with a network reaches Ray's ports: a job with such sessions needs Ray's token, and the token holds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap
from tree_rl.verl_plugin.compat import constants_ppo
from tree_rl.verl_plugin.launch.session_network import SANDBOX, refuse_open_ray

ROOT = Path(__file__).parents[2]
NETWORK = {"limits": {"network": True}}
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}

TRAINER = """
import json, os, sys
from pathlib import Path
import ray
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder

CLIENT = '''
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
keys = client.internal_kv_keys(b"", b"fun", timeout=10)
for key in keys:
    client.internal_kv_put(key, b"owned", True, b"fun", timeout=10)
print("OWNED", len(keys))
'''
address = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False).address_info["gcs_address"]
ray.get(ray.remote(lambda: 1).remote())
limits = Limits(timeout_seconds=60, cpu_seconds=60, memory_bytes=64 << 30, processes=256, network=True)
readable = [Path(path) for path in dict.fromkeys((sys.base_prefix, sys.prefix))]
sandbox = SandboxFolder({"client.py": CLIENT}, limits=limits, readable=readable)
token = os.environ.get("RAY_AUTH_TOKEN_PATH", "/none")
attack = sandbox.run(f"{sys.executable} client.py {address}").output
seen = sandbox.run(f"env; cat {token}; cat /proc/*/environ; ls -R / 2>/dev/null | grep -i token_of_ray").output
sandbox.close()
print(json.dumps({"attack": attack, "seen": seen}))
ray.shutdown()
"""


def config_with(sandbox: dict[str, object]) -> object:
    config = OmegaConf.create({})
    OmegaConf.update(config, SANDBOX, sandbox, force_add=True)
    return config


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token_of_ray"
    path.write_text("5ec2e7" * 8)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [None, "disabled"])
@pytest.mark.parametrize("sandbox, key", [(NETWORK, "limits.network=true"), ({"backend": "docker"}, "backend=docker")])
def test_a_network_without_the_token_is_refused_before_ray_starts(
    mode: str | None, sandbox: dict[str, object], key: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    named = re.escape(f"RAY_AUTH_MODE={mode or '(unset)'}")
    with pytest.raises(SystemExit):
        constants_ppo.get_ppo_ray_runtime_env(config_with(sandbox))
    assert re.search(rf"agent_options\.sandbox\.{key}.*{named}", capsys.readouterr().err)


def test_the_token_must_be_there_and_for_its_owner_alone(token: Path) -> None:
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    refuse_open_ray(config_with(NETWORK), variables)
    refuse_open_ray(config_with(NETWORK), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"})
    with pytest.raises(ValueError, match=r"sandbox\.readable shows .*RAY_AUTH_TOKEN_PATH"):
        refuse_open_ray(config_with({**NETWORK, "readable": [str(token.parent)]}), variables)
    token.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 640, expected 600"):
        refuse_open_ray(config_with(NETWORK), variables)
    token.unlink()
    with pytest.raises(ValueError, match=r"limits\.network=true needs Ray's token.*RAY_AUTH_TOKEN_PATH"):
        refuse_open_ray(config_with(NETWORK), variables)


def test_sessions_without_a_network_need_no_token() -> None:
    for sandbox in ({}, {"limits": {"network": False}}, {"backend": "local", "unconfined": True}):
        refuse_open_ray(config_with(sandbox), {"RAY_AUTH_MODE": "disabled"})
    refuse_open_ray(OmegaConf.create({}), {})
    refuse_open_ray(None, {})


def test_the_scripts_make_a_token_of_mode_600_and_leave_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    script = f"set -euo pipefail; umask 000; source {ROOT}/scripts/ray_token.sh; ray_token_use; echo $RAY_AUTH_MODE"

    def mode_of(**variables: str) -> str:
        done = subprocess.run(["bash", "-c", script], env=CLEAN | variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert mode_of(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN_PATH=str(path)) == "disabled" and not path.exists()
    assert mode_of(RAY_AUTH_TOKEN_PATH=str(path)) == "token"
    first = path.read_text()
    path.chmod(0o644)
    assert mode_of(RAY_AUTH_TOKEN_PATH=str(path)) == "token"
    assert len(first) == 64 and path.read_text() == first and path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def attack_ray(**variables: str) -> dict[str, str]:
    command, given = [sys.executable, "-c", TRAINER], {"env": CLEAN | variables, "timeout": 200}
    done = subprocess.run(command, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(450)
@pytest.mark.skipif(why_no_bubblewrap() is not None, reason="bubblewrap does not work here")
def test_from_a_session_with_a_network_only_the_token_keeps_ray_shut(token: Path) -> None:
    assert "OWNED" in attack_ray(RAY_AUTH_MODE="disabled")["attack"], "the attack works where nothing stops it"
    held = attack_ray(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    assert "OWNED" not in held["attack"] and "uthenticat" in held["attack"], held["attack"]
    assert token.read_text() not in held["seen"] and "RAY_AUTH" not in held["seen"]
    assert "token_of_ray" not in held["seen"].replace(f"cat: {token}", "")
