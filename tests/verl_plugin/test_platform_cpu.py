"""On a machine without an accelerator verl runs as it is: its platform is found."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tree_rl.verl_plugin.cpu import platform_cpu


def run_python(code: str, **env: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")}
    command, environment = [sys.executable, "-c", textwrap.dedent(code)], {**inherited, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=200, check=True).stdout


@pytest.mark.slow
def test_another_choice_of_platform_is_respected() -> None:
    code = "import verl; from verl.plugin.platform import get_platform; print(type(get_platform()).__name__)"
    assert run_python(code, VERL_PLATFORM="nvidia").split()[-1] == "PlatformCUDA"


def test_a_cuda_build_without_a_device_is_left_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not platform_cpu.PlatformCPU().is_platform_available(use_smi_check=True)


@pytest.mark.skipif(platform_cpu.torch_has_accelerator(), reason="this torch build needs VERL_PLATFORM=cpu")
def test_verl_finds_the_platform_by_itself() -> None:
    run_python(
        """
        import verl
        from verl.plugin.platform import get_platform
        from verl.utils.device import get_device_id, get_device_name, get_torch_device
        assert type(get_platform()).__name__ == "PlatformCPU", get_platform()
        assert (get_device_name(), str(get_device_id()), get_torch_device().is_available()) == ("cpu", "cpu", False)
        """
    )
