"""flash-attn-4 is optional and narrow: what it cannot do is refused by name, and auto goes elsewhere."""

import re
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from tree_kernels import chosen_implementation, unavailable_reason
from tree_kernels.tree_attention.fa4.autograd import ENTRY, VERSIONS, fa4_unavailable_reason, package_reason
from tree_kernels.tree_attention.fa4.precompile import PrecompileError, precompile

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"device": torch.device("cpu")}, "needs a CUDA device, received cpu"),
        ({"dtype": torch.float32}, "received torch.float32"),
        ({"head_size": 96}, r"head size of \(64, 128, 192, 256\), received 96"),
        ({"head_size": 80}, "received 80"),
        ({"value_size": 256}, "value size of at most 128 with a head size of 128, received 256"),
        ({"value_size": 192}, "value size of at most 128 with a head size of 128, received 192"),
        ({"head_size": 192}, "value size of at most 128 with a head size of 192, received 192"),
        ({"deterministic": True}, "deterministic=True"),
        ({"softcap": 30.0}, "soft cap's tanh to 11 bits, received softcap=30.0"),
        ({"needs_lse": True}, "log-sum-exp are unproven, received sinks or return_lse=True"),
    ],
)
def test_what_it_cannot_do_is_named_and_auto_goes_elsewhere(
    changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "head_size": 128}
    assert re.search(complaint, str(fa4_unavailable_reason(**(usual | changes))))
    # By name the module is hidden behind the function of the same name as its package.
    module = sys.modules[fa4_unavailable_reason.__module__]
    monkeypatch.setattr(module, "package_reason", lambda: None)
    monkeypatch.setattr(module, "version_reason", lambda head_size: None)
    monkeypatch.setattr(module, "_device_reason", lambda device: None)
    for serves in (usual, usual | {"head_size": 192, "value_size": 128}):
        assert chosen_implementation(**serves) == "fa4"
    assert chosen_implementation(**(usual | changes)) != "fa4"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages in front of all others; flash-attn-4 may be installed or not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package_reason.cache_clear()
    yield tmp_path
    package_reason.cache_clear()


def install(site: Path, version: str) -> Path:
    """What an installer leaves of flash-attn-4, as far as it is looked at."""
    entry = site / ENTRY
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"# the kernels' door\n")
    about = site / f"flash_attn_4-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")
    digest = urlsafe_b64encode(sha256(entry.read_bytes()).digest()).rstrip(b"=").decode()
    (about / "RECORD").write_text(f"{ENTRY},sha256={digest},{entry.stat().st_size}\n")
    return entry


@pytest.mark.parametrize("version", VERSIONS)
def test_a_proven_version_serves(version: str, site: Path) -> None:
    install(site, version)
    assert package_reason() is None


def test_a_head_size_that_a_version_fails_with_is_refused(site: Path) -> None:
    install(site, "4.0.0b19")
    reason = str(fa4_unavailable_reason(CUDA, torch.bfloat16, 256))
    assert reason == "flash-attn-4 4.0.0b19 fails with a head size of 256, which 4.0.0b36 runs (constraints/fa4.txt)"
    options: dict[str, Any] = {"query_heads_per_key_head": [1], "dtypes": ["bfloat16"], "windows": [False]}
    with pytest.raises(PrecompileError, match=r"4\.0\.0b19 fails with a head size of 256"):
        precompile(head_sizes=[64, 256], **options, arch="sm_90a", cache=site / "cache", report=print)


def test_another_version_is_refused(site: Path) -> None:
    install(site, "4.0.0b40")
    reason = str(package_reason())
    assert "4.0.0b36 or 4.0.0b19 is needed, found 4.0.0b40" in reason and "tree_rl[fa4]" in reason
    assert unavailable_reason("fa4", device=CUDA, dtype=torch.bfloat16, head_size=128) == reason
    assert chosen_implementation(device=CUDA, dtype=torch.bfloat16, head_size=128) != "fa4"


def test_a_package_that_is_not_there_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    assert str(package_reason()).startswith("flash-attn-4 is not installed")


def test_flash_attn_2_in_the_same_place_is_refused(site: Path) -> None:
    install(site, "4.0.0b19").write_bytes(b"# flash-attn 2 was installed afterwards\n")
    assert "is not its own file, as after an installation of flash-attn 2" in str(package_reason())


def test_flash_attn_2_in_front_is_refused(site: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    install(site, "4.0.0b19")
    other = tmp_path_factory.mktemp("other")
    (other / ENTRY).parent.mkdir(parents=True)
    (other / ENTRY).write_bytes(b"")
    (other / "flash_attn" / "__init__.py").write_bytes(b"raise AssertionError('nothing is imported to find out')")
    sys.path.insert(0, str(other))
    try:
        assert f"hidden by another package: {other}" in str(package_reason())
    finally:
        sys.path.remove(str(other))


def test_importing_the_kernels_imports_neither_the_package_nor_its_compiler() -> None:
    code = "import sys, tree_kernels; assert not {'flash_attn', 'cutlass'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
