"""Kernels are compiled once, without a GPU, and found again by another process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tree_kernels.tree_attention.fa4.autograd import package_reason
from tree_kernels.tree_attention.fa4.precompile import (
    PrecompileError,
    cache_environment,
    compiled_kernels,
    precompile,
    runtime_environment,
)

PROGRAM = """
import sys
from pathlib import Path
from tree_kernels.tree_attention.fa4.precompile import precompile
windows = [window == "True" for window in sys.argv[2:]]
print(precompile(head_sizes=[128], query_heads_per_key_head=[2], dtypes=["bfloat16"], windows=windows,
                 arch="sm_90a", cache=Path(sys.argv[1]), report=print))
"""


@pytest.mark.parametrize(
    ("head_sizes", "dtypes", "complaint"),
    [
        ([64, 80], ["bfloat16"], r"head size: .*received \[80\]"),
        ([64], ["float32"], r"dtype: .*received \['float32'\]"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    head_sizes: list[int], dtypes: list[str], complaint: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"query_heads_per_key_head": [1], "windows": [False], "arch": "sm_90a"}
    with pytest.raises(PrecompileError, match=complaint):
        precompile(head_sizes=head_sizes, dtypes=dtypes, cache=tmp_path, report=print, **options)


def test_a_target_that_no_kernel_was_proven_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecompileError, match=r"expected sm_90a .*received 'sm_100a'"):
        cache_environment("sm_100a", tmp_path)
    assert cache_environment("sm_90", tmp_path) == cache_environment("sm_90a", tmp_path)
    assert runtime_environment(tmp_path).items() <= cache_environment("sm_90a", tmp_path).items()


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    reason = package_reason()
    if reason is not None:
        pytest.skip(reason)

    def compiled(*windows: str) -> int:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), *windows]
        result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280, env=dict(os.environ))
        return int(result.stdout.splitlines()[-1])

    # Forward, backward, preprocessing and two postprocessings: of a forest, of few and of many rows that share nothing.
    # For many, one finds the row of a block and three count blocks, one for each size of tile.
    assert compiled("False") == len(list(compiled_kernels(tmp_path))) == 3 * 5 + 1 + 3
    assert compiled("False") == 0
    assert compiled("False", "True") == 2, "a window has a forward and a backward of its own"
    assert compiled("True") == 0
