"""Equal text, other ids: what a real sample changes into when it is decoded and tokenized again, found and avoided.

Everything that a drift report can hold, and every end of a session, is a metric of the step that the docs name.
"""

import random
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from dictated_answers import Scene
from dictated_answers import user as said_by_user
from gateway_harness import CHATML, build_tokenizer, misspell, talking, user

from tree_rl.rollout.agents.in_environment import SCORED
from tree_rl.rollout.gateway.dialects.dialect import CallFault
from tree_rl.rollout.gateway.tokens.drift import BranchCause, DriftKind, DriftReport, find_drifted_siblings
from tree_rl.rollout.transcript import ModelCall, rows_of_calls
from tree_rl.verl_plugin.trainer.step_metrics import session_metrics


@pytest.mark.parametrize("on_drift", ["reuse", "branch"])
def test_drawn_turns_drift_and_reuse_keeps_what_branch_tokenizes_anew(on_drift: str) -> None:
    tokenizer, rng, found = build_tokenizer(CHATML), random.Random(0), 0
    texts = [number for number in range(len(tokenizer)) if number not in tokenizer.added_tokens_decoder]
    for _ in range(16):
        scene, question = Scene(tokenizer, on_drift=on_drift, reasoning="inline"), said_by_user("the forest")
        answer = scene.answer([question], rng.choices(texts, k=5), end="")
        scene.answer([question, answer, said_by_user("more")], "so")
        first, second = scene.recorder.calls
        ids, report = first.prompt_ids + first.response_ids, scene.recorder.drift_report()
        drifts, is_kept = scene.encode(tokenizer.decode(ids)) != list(ids), on_drift == "reuse"
        assert report.returned == ({0: "retokenized"} if drifts else {})
        assert report.figures()["drift_avoided"] == (drifts and is_kept)
        assert len(rows_of_calls(scene.recorder.calls)) == 1 + (drifts and not is_kept)
        if is_kept:
            assert second.prompt_ids[: len(ids)] == ids and report.siblings == ()
        else:
            assert scene.encode(tokenizer.decode(second.prompt_ids)) == list(second.prompt_ids)
            # Two spellings of bytes that are no character need not meet.
            assert len(report.siblings) == drifts or "\ufffd" in tokenizer.decode(first.response_ids)
        found += drifts if is_kept else len(report.siblings)
    assert found >= 4, "what a model draws does drift"


@pytest.mark.parametrize("seed", range(5))
def test_siblings_of_one_text_are_found_wherever_they_part(tiny: SimpleNamespace, seed: int) -> None:
    text = "every unique token of the forest stands once"
    plain = tiny.tokenizer.encode(text, add_special_tokens=False)
    other = misspell(tiny.tokenizer, text, seed)
    longer = [*plain, 40, 41]
    calls = [
        ModelCall(prompt_ids=(1, 5, *spelled), response_ids=(7,), log_probs=None) for spelled in (plain, other, longer)
    ]
    assert find_drifted_siblings(calls, tiny.tokenizer.decode) in (((0, 1),), ((1, 2),))


async def test_counting_tokens_reports_nothing(tiny: SimpleNamespace) -> None:
    edited = [user("hello"), {"role": "assistant", "content": "another text"}, user("and then?")]
    async with talking(tiny.backend({"hello": "the text"})) as talk:
        await talk.anthropic.messages.create(model="m", messages=edited[:1], max_tokens=300)
        count = await talk.anthropic.messages.count_tokens(model="m", messages=edited)
    assert count.input_tokens > len(talk.record.calls[0].prompt_ids)
    assert set(talk.record.drift.figures().values()) == {0}


def test_texts_that_differ_are_no_drift(tiny: SimpleNamespace) -> None:
    encode = tiny.tokenizer.encode
    calls = [
        ModelCall(prompt_ids=tuple(encode(text, add_special_tokens=False)), response_ids=(2,), log_probs=None)
        for text in ("the forest stands", "the forest falls", "the fores", "another")
    ]
    assert find_drifted_siblings(calls, tiny.tokenizer.decode) == ()


DOCS = Path(__file__).parents[2] / "docs"
NOTHING = DriftReport()
ENTRIES: dict[str, tuple[Any, ...]] = {
    "returned": get_args(DriftKind),
    "siblings": ((0, 1),),
    "branch_causes": get_args(BranchCause),
    "guessed": (4,),
    "unread": get_args(CallFault),
}


@pytest.mark.parametrize("was_reused", [True, False])
@pytest.mark.parametrize("field", [field.name for field in fields(DriftReport) if field.name != "was_reused"])
def test_every_entry_of_the_report_counts_under_names_of_its_own(field: str, was_reused: bool) -> None:
    found = []
    for entry in ENTRIES[field]:
        twice = (entry, entry) if field in ("siblings", "guessed") else {1: entry, 2: entry}
        figures = DriftReport(**{"was_reused": was_reused, field: twice}).figures()
        assert figures.keys() == NOTHING.figures().keys() and set(figures.values()) == {0, 2}
        assert (figures["drift_avoided"] == 2) == (field == "returned" and was_reused)
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
