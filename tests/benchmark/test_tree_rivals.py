"""The comparison with other libraries finds trees right and a wrong gradient wrong."""

import argparse
from pathlib import Path

import pytest
import torch
import tree_rivals
from safetensors.torch import load_file

from tree_rl.benchmark.gradient_errors import FLOAT32_LIMIT, relative_error

SIZES = argparse.Namespace(model="tiny", layers=None, rows=4, row_tokens=40, groups=2)


@pytest.mark.parametrize("shape", ["agents", "prompt"])
def test_trees_have_the_gradient_of_rows_alone(tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    unique = tree_rivals.write_rows(tmp_path, SIZES, por=0.5, shape=shape)
    assert abs(unique - 160) <= 2
    for name in ("truth", "tree_rl"):
        tree_rivals.play(name, tmp_path, "cpu", repeats=1)
    truth = load_file(tmp_path / "truth.safetensors")
    found = load_file(tmp_path / "tree_rl.safetensors")
    assert truth.keys() == found.keys() and f'"tokens": {unique}' in capsys.readouterr().out
    error = relative_error(list(found.values()), [truth[name] for name in found])
    assert 0 < error < FLOAT32_LIMIT
    found["model.norm.weight"] += 1e-3 * found["model.norm.weight"].abs().max()
    assert relative_error(list(found.values()), [truth[name] for name in found]) > FLOAT32_LIMIT


def test_attention_of_packed_rows_is_causal_from_their_ends() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 4), torch.randn(7, 1, 4)
    rows = (q, k, k, torch.tensor([0, 1, 3]), torch.tensor([0, 3, 7]), 2, 4)
    options = {"softmax_scale": 1.0, "causal": True, "window_size": (-1, -1)}
    got = tree_rivals._VariableLength.flash_attn_varlen_func(*rows, **options)
    for query, visible in ((0, k[:3]), (1, k[3:6]), (2, k[3:7])):
        wanted = (q[query] @ visible[:, 0].T).softmax(-1) @ visible[:, 0]
        torch.testing.assert_close(got[query], wanted)
