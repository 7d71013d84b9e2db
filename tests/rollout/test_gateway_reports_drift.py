"""Equal text, other ids: what a real sample changes into when it is decoded and tokenized again, found and avoided.

Everything that a drift report can hold, and every end of a session, is a metric of the step that the docs name.
"""

import re
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from gateway_harness import CHATML, Talk, TinyModel, build_tokenizer, misspell, serving, talking, user

from tree_rl.rollout.agents.in_environment import SCORED
from tree_rl.rollout.gateway.dialects.dialect import CallFault
from tree_rl.rollout.gateway.tokens.drift import BranchCause, DriftKind, DriftReport, find_drifted_siblings
from tree_rl.rollout.transcript import ModelCall, rows_of_calls
from tree_rl.verl_plugin.trainer.step_metrics import session_metrics


async def two_turns_sampled(tiny: SimpleNamespace, on_drift: str) -> list[Any]:
    """Sessions of two sampled turns each; the template writes every turn as it is."""
    backend = TinyModel(tiny.model, build_tokenizer(CHATML))
    records = []
    options = {"on_drift": on_drift, "reasoning": "inline"}
    async with serving(backend, backend.tokenizer, **options) as gateway, AsyncExitStack() as left:
        for number in range(16):
            talk = Talk(gateway, backend, left)
            question = user(f"question {number}")
            said = (await talk.ask([question], max_tokens=5)).choices[0].message.model_dump()
            await talk.ask([question, said, user("more")], max_tokens=5)
            records.append(await talk.close())
    return records


def changes(tiny: SimpleNamespace, call: ModelCall) -> bool:
    """Whether what was generated, decoded with its prompt and tokenized again, gets other ids."""
    ids = call.prompt_ids + call.response_ids
    return tuple(tiny.tokenizer.encode(tiny.tokenizer.decode(ids), add_special_tokens=False)) != ids


async def test_real_samples_drift_and_reuse_keeps_every_one_of_them(tiny: SimpleNamespace) -> None:
    records = await two_turns_sampled(tiny, "reuse")
    drifting = [changes(tiny, record.calls[0]) for record in records]
    assert sum(drifting) >= 4, "the model's samples do drift"
    for record, drifts in zip(records, drifting, strict=True):
        assert len(rows_of_calls(record.calls)) == 1
        assert record.drift.siblings == () and record.drift.figures()["drift_avoided"] == drifts
        first, second = record.calls
        assert second.prompt_ids[: len(first.prompt_ids + first.response_ids)] == first.prompt_ids + first.response_ids
        assert record.drift.returned == ({0: "retokenized"} if drifts else {})


async def test_branch_tokenizes_anew_and_every_drift_becomes_a_branch(tiny: SimpleNamespace) -> None:
    records = await two_turns_sampled(tiny, "branch")
    branched = 0
    for record in records:
        first, second = record.calls
        drifts = changes(tiny, first)
        text = tiny.tokenizer.decode(second.prompt_ids)
        assert tuple(tiny.tokenizer.encode(text, add_special_tokens=False)) == second.prompt_ids
        assert len(rows_of_calls(record.calls)) == 1 + drifts
        assert record.drift.figures()["drift_avoided"] == 0 and len(record.drift.returned) == drifts
        # A turn that ends within a character has no end that both spellings could reach.
        if drifts and not tiny.tokenizer.decode(first.response_ids).endswith("\ufffd"):
            assert record.drift.siblings == ((0, 1),)
            branched += 1
    assert branched >= 4


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
        record = await talk.close()
    assert count.input_tokens > len(record.calls[0].prompt_ids)
    assert set(record.drift.figures().values()) == {0}


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
