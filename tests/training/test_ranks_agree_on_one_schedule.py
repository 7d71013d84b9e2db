"""Any ranks' ops merge into one sequence that each of them can follow with dummies, its own ops in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tree_rl.training.ranks.lock_step import FORWARD_OF, merge_ops


@st.composite
def legal_ops(draw: st.DrawFn) -> str:
    """Partitions depth first, every backward after its forward; then perhaps a forest with images."""
    ops, balance = "", 0
    for _ in range(draw(st.integers(0, 12))):
        forward = balance == 0 or draw(st.booleans())
        ops += "F" if forward else "B"
        balance += 1 if forward else -1
    return ops + "B" * balance + draw(st.sampled_from(("", "VFBW", "VFFBBWVFBW")))


def follow(merged: str, ops: str) -> None:
    """Run one rank along the merged sequence."""
    at = 0
    dummy_graphs = {"F": 0, "V": 0}
    for op in merged:
        if at < len(ops) and ops[at] == op:
            at += 1
            continue
        dummy_graphs[FORWARD_OF.get(op, op)] += -1 if op in FORWARD_OF else 1
        assert min(dummy_graphs.values()) >= 0, "a dummy backward without a dummy forward"
    assert at == len(ops), "a rank's own op was left out"


@given(ops_of_rank=st.lists(legal_ops(), min_size=1, max_size=4))
def test_every_rank_can_follow(ops_of_rank: list[str]) -> None:
    merged = merge_ops(ops_of_rank)
    for ops in ops_of_rank:
        follow(merged, ops)
    assert len(merged) <= 3 * sum(map(len, ops_of_rank)) + 3


@given(ops=legal_ops(), other=legal_ops(), ranks=st.integers(1, 4))
def test_equal_ranks_need_no_dummy_and_the_order_of_ranks_changes_no_length(ops: str, other: str, ranks: int) -> None:
    assert merge_ops([ops] * ranks) == ops
    assert merge_ops([ops, other]) == merge_ops([ops, other])
    assert len(merge_ops([ops, other])) == len(merge_ops([other, ops]))


@pytest.mark.parametrize("ops, other", (("FFF", "F"), ("VFBWVFBW", "FBFB")))
def test_inference_needs_forwards_alone_and_a_tower_waits_for_no_other_forest(ops: str, other: str) -> None:
    assert merge_ops([ops, other]) == ops


@pytest.mark.parametrize("ops", ("BF", "FBB", "FX", "FWBV"))
def test_illegal_ops_name_the_rank(ops: str) -> None:
    with pytest.raises(ValueError, match="rank 1"):
        merge_ops(["FB", ops])
