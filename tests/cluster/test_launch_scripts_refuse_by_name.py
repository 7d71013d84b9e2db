"""The scripts of scripts/cluster parse, and refuse bad arguments and open tokens in one line, before Ray starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/cluster"
SHELL_FILES = sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")])
RECIPE = ("bash", "recipes/grpo/run_qwen3_fsdp2.sh")


def run_script(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "VERL_PLATFORM": "cpu", **variables}
    for absent in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "SLURM_SUBMIT_DIR"):
        environment.pop(absent, None) if absent not in variables else None
    command = ["bash", str(SCRIPTS / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_scripts_parse_and_shellcheck_has_nothing_to_say() -> None:
    assert len(SHELL_FILES) >= 7
    commands = [["bash", "-n", str(path)] for path in SHELL_FILES]
    if shutil.which("shellcheck") is not None:
        commands.append(["shellcheck", "--external-sources", "--source-path", str(ROOT), *map(str, SHELL_FILES)])
    for command in commands:
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("launch.sh", (), "expected the number of nodes first, received 'nothing'"),
        ("submit.sh", RECIPE, "expected the number of nodes first, received 'bash'"),
        ("kubernetes.sh", ("0", "--", *RECIPE), "expected the number of nodes first, received '0'"),
        ("kubernetes.sh", ("2",), "expected a command after the number of nodes"),
        ("launch.sh", ("2", "--"), "expected a command after the number of nodes"),
    ],
)
def test_number_of_nodes_and_command_are_asked_for(name: str, arguments: tuple[str, ...], message: str) -> None:
    refused = run_script(name, *arguments)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"{name}: {message}")
    assert f"for example: {name} 2 -- bash recipes/grpo/run_qwen3_fsdp2.sh" in refused.stderr


WORKER, HEAD = "ray_worker.sh", "ray_head.sh"
PORTS = "expected {} to be a port outside 10002-19999"
READABLE = "(mode {:o}, expected 600); who reads it runs code on every node: chmod 600 TOKEN"
NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "arguments", "variables", "mode", "message"),
    [
        *(
            (WORKER, (head,), {}, None, f"expected the head's HOST:PORT first, received '{head or 'nothing'}'")
            for head in ("", "10.0.0.1:", "a b:1")
        ),
        (WORKER, (NOBODY,), {}, None, "no token in TOKEN; copy the head's file here (scp -p HEAD:.ray/auth_token"),
        *((WORKER, (NOBODY,), {}, mode, READABLE.format(mode)) for mode in (0o640, 0o604)),
        (WORKER, (NOBODY,), {"WAIT_SECONDS": "1", "NODE_IP": "127.0.0.1"}, 0o600, f"answer from the head at {NOBODY}"),
        *(
            (HEAD, (), {name: port}, None, PORTS.format(name))
            for name, port in (("HEAD_PORT", "17111"), ("HEAD_PORT", "six"), ("DASHBOARD_PORT", "0"))
        ),
        (HEAD, (), {"INTERFACE": "no_such_network"}, 0o600, "INTERFACE=no_such_network has no IPv4 address here"),
        ("slurm.sbatch", RECIPE, {"SLURM_SUBMIT_DIR": "/"}, None, "expected to be submitted from the repository"),
    ],
)
def test_what_a_node_cannot_use_is_named(
    name: str, arguments: tuple[str, ...], variables: dict[str, str], mode: int | None, message: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    if mode is not None:
        token.write_text("secret")
        token.chmod(mode)
    refused = run_script(name, *arguments, RAY_AUTH_TOKEN_PATH=str(token), **variables)
    assert refused.returncode == 2
    assert message.replace("TOKEN", str(token)) in refused.stderr
    assert token.exists() == (mode is not None)


def test_head_uses_a_token_of_its_owner_whatever_the_shell_has_switched_off(tmp_path: Path) -> None:
    """scripts/ray_token.sh makes and keeps it, in test_sessions_with_a_network_need_rays_token.py."""
    token = tmp_path / "token"
    source = f"source {SCRIPTS}/node.sh; cluster_find_python; cluster_use_token create; env"
    own = {"PYTHON": sys.executable, "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"} | own
    done = subprocess.run(["bash", "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert "RAY_AUTH_MODE=token\n" in done.stdout and f"RAY_AUTH_TOKEN_PATH={token}\n" in done.stdout
    assert token.stat().st_mode & 0o777 == 0o600 and token.read_text() not in done.stdout


def test_environment_without_ray_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python3").symlink_to(Path(sys.base_prefix).resolve() / "bin/python3")
    refused = run_script("launch.sh", "2", *RECIPE, PYTHON=str(bare / "python3"), PATH="/usr/bin:/bin")
    assert refused.returncode == 2
    assert "no ray beside" in refused.stderr


def test_slurm_template_runs_only_in_a_job() -> None:
    outside = run_script("slurm.sbatch", *RECIPE)
    assert outside.returncode != 0 and "submit this file with sbatch" in outside.stderr
