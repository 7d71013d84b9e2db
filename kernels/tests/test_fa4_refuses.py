"""flash-attn-4 is optional and narrow: what it cannot do is refused by name, and auto goes elsewhere."""

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch

from tree_kernels import UnsupportedImplementation, chosen_implementation, tree_attention, unavailable_reason
from tree_kernels.tree_attention.fa4.autograd import VERSION, fa4_unavailable_reason, package_reason

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"device": torch.device("cpu")}, "needs a CUDA device, received cpu"),
        ({"dtype": torch.float32}, "received torch.float32"),
        ({"head_size": 96}, r"head size of \(64, 128, 256\), received 96"),
        ({"deterministic": True}, "deterministic=True"),
        ({"softcap": 30.0}, "soft cap's tanh to 11 bits, received softcap=30.0"),
        ({"needs_lse": True}, "log-sum-exp are unproven, received sinks or return_lse=True"),
    ],
)
def test_what_it_cannot_do_is_named(changes: dict[str, Any], complaint: str) -> None:
    arguments: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "head_size": 128} | changes
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(fa4_unavailable_reason(**arguments))


@pytest.mark.parametrize(
    ("installed", "complaint"), [(None, "is not installed"), ("4.0.0b40", f"=={VERSION} is needed, found 4.0.0b40")]
)
def test_only_the_pinned_version_is_used(
    installed: str | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "flash-attn-4"
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    package_reason.cache_clear()
    try:
        reason = str(package_reason())
        assert complaint in reason and "tree_rl[fa4]" in reason
        assert unavailable_reason("fa4", device=CUDA, dtype=torch.bfloat16, head_size=128) == reason
        assert chosen_implementation(device=CUDA, dtype=torch.bfloat16, head_size=128) != "fa4"
    finally:
        package_reason.cache_clear()


@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"needs_lse": True}, {"deterministic": True}, {"head_size": 80}, {"dtype": torch.float32}],
)
def test_auto_goes_elsewhere_for_options_it_lacks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # By name the module is hidden behind the function of the same name as its package.
    module = sys.modules[fa4_unavailable_reason.__module__]
    monkeypatch.setattr(module, "package_reason", lambda: None)
    monkeypatch.setattr(module, "_device_reason", lambda device: None)
    arguments: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "head_size": 128}
    assert chosen_implementation(**arguments) == "fa4"
    assert chosen_implementation(**(arguments | options)) != "fa4"


def test_a_call_by_name_on_a_cpu_is_refused_not_replaced() -> None:
    q = torch.randn(4, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedImplementation, match='impl="fa4" cannot run here: flash-attn-4 needs a CUDA device'):
        tree_attention(q, q, q, torch.tensor([4, 4, 4, 4]), impl="fa4")


def test_importing_the_kernels_imports_neither_the_package_nor_its_compiler() -> None:
    code = "import sys, tree_kernels; assert not {'flash_attn', 'cutlass'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
