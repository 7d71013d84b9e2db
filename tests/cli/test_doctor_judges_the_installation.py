"""`tree-rl doctor` passes here, also inside a Ray worker, and fails where verl is kept from loading the plugin."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from tree_rl.cli import app
from tree_rl.verl_plugin.checks.doctor import Status, diagnose


@pytest.mark.slow
@pytest.mark.ray
def test_sound_installation_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = {line[:26].strip(): line[28:34].strip() for line in result.output.splitlines()}
    for subject in ("verl", "a tree against its rows", "plugin in a fresh process", "plugin in a Ray worker"):
        assert lines[subject] == "ok", result.output
    assert lines["fused layers (use_liger)"] == ("ok" if torch.cuda.is_available() else "absent"), result.output


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", None], ids=["platform_named", "platform_found"])
def test_disabled_plugin_fails_by_name(monkeypatch: pytest.MonkeyPatch, platform: str | None) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if platform:
        monkeypatch.setenv("VERL_PLATFORM", platform)
    result = CliRunner().invoke(app, ["doctor", "--no-ray"])
    assert result.exit_code == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in result.output
    assert "1 failed: plugin in a fresh process" in result.output


@pytest.mark.parametrize("folder", ("my code", "it's", "a$b", "a(b)"))
def test_an_interpreter_that_ray_cannot_start_fails_by_name(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    python = f"/srv/{folder}/.venv/bin/python"
    monkeypatch.setattr(sys, "executable", python)
    finding = next(diagnose(start_ray=False))
    assert (finding.subject, finding.status) == ("python", Status.FAILED) and python in finding.detail
