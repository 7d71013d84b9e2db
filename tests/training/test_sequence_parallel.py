"""Ranks that share a forest's tokens: outputs and gradients of rows run alone, in float32, for any model and shape."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from sharing_ranks import (
    CRITIC,
    LORA,
    MODELS,
    SHAPES,
    Case,
    assert_no_failures,
    build,
    join,
    prepare,
    rank_main,
    spawn,
    step,
)

FOUR_SHARE = [
    *(Case(shapes=(shape,)) for shape in ("identical_and_strict_prefix", "single_tokens", "one_token", "long_trunk")),
    *(Case(model=model, shapes=("comb",), max_tokens=6) for model in MODELS[1::2]),
    Case(shapes=("branches",), max_tokens=4, is_coupled=True),
]
"""One group of four ranks."""
TWO_SHARE = [
    Case(shapes=("no_common_root", "one_row"), max_tokens=6),
    *(Case(model=model, shapes=("branches", "comb"), max_tokens=7) for model in MODELS[2::2]),
    Case(shapes=("comb", "two_tokens"), is_coupled=True, is_sharded=True),
    Case(shapes=("long_trunk", ""), max_tokens=9, is_sharded=True),
    Case(model=CRITIC, shapes=("one_token", "branches"), is_sharded=True),
    Case(model=LORA, shapes=("", "long_trunk")),
]
"""Two groups of two ranks, each with rows of its own."""


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, 4, out, [(4, FOUR_SHARE), (2, TWO_SHARE)])
    return out


@pytest.mark.parametrize("size", [4, 2])
def test_ranks_that_share_tokens_train_as_rows_alone(four_ranks: Path, size: int) -> None:
    assert_no_failures(four_ranks, 4, of=f"{size}:")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_ranks_share_the_tokens_of_one_forest(tmp_path: Path) -> None:
    # One query head to a rank, each key-value head on four; some forests have fewer tokens than ranks.
    others = [*(Case(model=model, shapes=("comb",)) for model in MODELS), *(Case(shapes=(shape,)) for shape in SHAPES)]
    spawn(rank_main, 8, tmp_path, [(8, [*FOUR_SHARE, *others])])
    assert_no_failures(tmp_path, 8)


def refused_main(rank: int, world: int, out: str, port: int) -> None:
    """What ranks say to rows that differ, and to heads that cannot be divided."""
    join(rank, world, port)
    share = dist.new_group(list(range(world)))
    said = []
    unequal = Case(shapes=("comb",) if rank else ("branches",))
    one_head = Case(model="one_head", shapes=("comb",))
    for case in (unequal, one_head):
        try:
            step(case, prepare(build(case.model)), 0, share)
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    Path(f"{out}/said_{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def test_unequal_rows_and_too_few_heads_are_refused_on_every_rank(tmp_path: Path) -> None:
    spawn(refused_main, 2, tmp_path)
    for rank in range(2):
        unequal, one_head = json.loads((tmp_path / f"said_{rank}.json").read_text())
        assert unequal.startswith("RuntimeError: ranks [0, 1] share the tokens of their rows, but their rows or plans")
        assert "set ulysses_sequence_parallel_size to a divisor of 1" in one_head
