"""Everything that a drift report can hold, and every end of a session, is a metric of the step that the docs name."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tree_rl.rollout.agents.in_environment import SCORED
from tree_rl.rollout.gateway.dialects.dialect import CallFault
from tree_rl.rollout.gateway.tokens.drift import BranchCause, DriftedSiblings, DriftReport, ReturnedTurn
from tree_rl.verl_plugin.trainer.step_metrics import session_metrics

DOCS = Path(__file__).parents[2] / "docs"
NOTHING = DriftReport(returned=(), siblings=())
SIBLINGS = DriftedSiblings(calls=(0, 1), position=3, text="a")


def of_every(entry: type[Any], field: str, **others: Any) -> list[Any]:
    """One entry for each value that a field may have."""
    return [entry(**{field: value, **others}) for value in get_args(get_type_hints(entry)[field])]


RETURNED = {"call": 0, "position": 3, "text": "a"}
ENTRIES: dict[str, list[Any]] = {
    "returned": [
        *of_every(ReturnedTurn, "kind", was_reused=True, **RETURNED),
        *of_every(ReturnedTurn, "kind", was_reused=False, **RETURNED),
    ],
    "siblings": [SIBLINGS],
    "branch_causes": list(get_args(BranchCause)),
    "guessed": [4],
    "unread": list(get_args(CallFault)),
}


def test_every_field_of_the_report_is_tried() -> None:
    assert list(ENTRIES) == [field.name for field in fields(DriftReport)]


@pytest.mark.parametrize("field", ENTRIES)
def test_every_entry_of_the_report_counts_under_names_of_its_own(field: str) -> None:
    found = []
    for entry in ENTRIES[field]:
        twice = {1: entry, 2: entry} if field in ("branch_causes", "unread") else (entry, entry)
        figures = DriftReport(**{"returned": (), "siblings": (), field: twice}).figures()
        assert figures.keys() == NOTHING.figures().keys() and set(figures.values()) == {0, 2}
        found.append(frozenset(name for name, count in figures.items() if count))
    assert len(set(found)) == len(found), "entries of different causes have different names"


def test_all_counts_are_metrics_that_the_docs_name_and_no_others() -> None:
    metrics = session_metrics([{name: float(count) for name, count in NOTHING.figures().items()}])
    named = re.findall(r"`(tree/session/drift_\w+)`", (DOCS / "gateway.md").read_text(encoding="utf-8"))
    assert sorted(metrics) == sorted(named)


def test_the_hit_rate_is_a_share_of_tokens_and_absent_where_no_server_reports_one() -> None:
    sessions = [{"prefix_queries": 100.0, "prefix_hits": 90.0}, {"prefix_queries": 300.0, "prefix_hits": 150.0}]
    assert session_metrics(sessions)["tree/prefix_hit_rate"] == 0.6
    for figures in ({"prefix_queries": 0.0, "prefix_hits": 0.0}, {"prefix_queries": 2.0}):
        assert "tree/prefix_hit_rate" not in session_metrics([figures])


def test_the_docs_name_every_end_of_a_session() -> None:
    named = set(re.findall(r"`(?:tree/session/)?ended_(\w+)`", (DOCS / "agents.md").read_text(encoding="utf-8")))
    assert named == set(SCORED)
