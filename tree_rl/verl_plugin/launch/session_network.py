"""Refuses a job whose sessions have a network on which they can reach a Ray without authentication.

Without a token, anybody who reaches Ray can read and replace the functions that workers load. The check runs before
Ray starts, so before the job uses a GPU.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SANDBOX = "actor_rollout_ref.rollout.custom.gateway_agent.agent_options.sandbox"
NETWORKED = ("docker", "modal", "remote")
"""Back ends whose commands have their container's network."""
REMEDY = (
    "export RAY_AUTH_MODE=token, with the token in a file of mode 600: scripts/cluster/ray_head.sh makes one "
    "(`tree-rl recipes` writes that script)"
)


def refuse_open_ray(config: Any, variables: Mapping[str, str]) -> None:
    """Check the sandbox of `rollout.custom.gateway_agent` and the variables of the driver.

    Raises:
        ValueError: sessions have a network, and Ray has no token or one that others can read; names both keys.
    """
    sandbox = (None if config is None else OmegaConf.select(config, SANDBOX, default=None)) or {}
    key = _key_of_network(sandbox)
    if key is None:
        return
    mode = variables.get("RAY_AUTH_MODE")
    if (mode or "").lower() != "token":
        raise ValueError(
            f"{SANDBOX}.{key} gives sessions a network on which they reach Ray, and RAY_AUTH_MODE={mode or '(unset)'} "
            f"lets everybody there run code in the trainer; {REMEDY}; or leave sessions without a network"
        )
    if not variables.get("RAY_AUTH_TOKEN"):
        _check_file(_token_file(variables), sandbox.get("readable") or (), key)


def _key_of_network(sandbox: Mapping[str, Any]) -> str | None:
    """The option that gives sessions a network; None if none does."""
    if (sandbox.get("limits") or {}).get("network", False):
        return "limits.network=true"
    backend = sandbox.get("backend", "local")
    return f"backend={backend}" if backend in NETWORKED else None


def _token_file(variables: Mapping[str, str]) -> Path:
    home = Path(variables.get("HOME") or Path.home())
    return Path(variables.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")


def _check_file(path: Path, readable: Any, key: str) -> None:
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise ValueError(
            f"{SANDBOX}.{key} needs Ray's token, and {path} (RAY_AUTH_TOKEN_PATH) cannot be read: {error.strerror}; "
            f"{REMEDY}"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{SANDBOX}.{key}: others can read Ray's token in {path} (mode {mode:o}, expected 600): chmod 600 {path}"
        )
    shown = [place for place in readable if path.resolve().is_relative_to(Path(place).resolve())]
    if shown:
        raise ValueError(
            f"{SANDBOX}.readable shows {shown[0]} to sessions, and with it Ray's token in {path}; show less, or set "
            "RAY_AUTH_TOKEN_PATH to a file elsewhere"
        )
