"""The quickstart's task rewards what is on disk, its experts earn what they deserve, its words are single tokens."""

import asyncio
import random

import pytest
from quickstart.experts import HABITS, Demonstration, act, demonstrate
from quickstart.prepare import demonstration_table, prompt_table, task_words
from quickstart.task import ROOMS, draw_task, grade_report
from quickstart.tokenizer import build_tokenizer
from transformers import PreTrainedTokenizerFast

from tree_rl.tree import Forest

FILES = {"attic.txt": "stock: attic 7\n", "barn.txt": "stock: barn 0\n", "shed.txt": "stock: shed 3\n"}
EARNED = {"careful": 1.0, "forgetful": 1 / 3, "hasty": 1 / 3, "quitter": 0.0}
ROWS = {"careful": 5, "forgetful": 5, "hasty": 3, "quitter": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(task_words())


def session_of(habit: str, tokenizer: PreTrainedTokenizerFast) -> Demonstration:
    task = draw_task(random.Random(1))
    (played,) = asyncio.run(demonstrate([(HABITS[habit], task)], tokenizer))
    return played


EXACT, PARTLY = ("attic 7 barn 0 shed 3\n", "shed 3 attic 7 barn 0"), ("attic 7",)
WRONG = ("attic 1 attic 7", "attic seven barn", "", None)


@pytest.mark.parametrize(
    ("report", "reward"),
    [(report, reward) for reports, reward in ((EXACT, 1.0), (PARTLY, 1 / 3), (WRONG, 0.0)) for report in reports],
)
def test_reward_is_the_share_of_rooms_whose_first_mention_is_right(report: str | None, reward: float) -> None:
    assert grade_report(report, ["attic", "barn", "shed"], FILES) == pytest.approx(reward)


@pytest.mark.parametrize("habit", HABITS)
def test_an_expert_earns_what_its_commands_achieve_and_branches(habit: str, tokenizer: PreTrainedTokenizerFast) -> None:
    record = session_of(habit, tokenizer)
    assert record.done.reward == pytest.approx(EARNED[habit])
    assert record.done.outcome.is_complete
    assert record.done.outcome.malformed_calls == 0
    table = demonstration_table([record])
    assert len(table) == ROWS[habit]
    if len(table) > 1:
        assert Forest.from_rows(list(table.input_ids)).por > 0.3


def test_shares_of_the_experts_add_up() -> None:
    assert sum(habit.share for habit in HABITS.values()) == pytest.approx(1.0)


def test_words_and_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in [*(f" {room}" for room in ROOMS), *(f" {digit}" for digit in range(10)), "cat", "echo"]:
        assert len(tokenizer.encode(word)) == 1, word


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in (act("read", ["ls -la | wc -c"]), "Grüße, 世界 \t\n\n  42"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_template_strips_the_reasoning_of_earlier_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []}
    messages = [{"role": "user", "content": "x"}, turn]
    assert "hm" in tokenizer.apply_chat_template(messages, tokenize=False)
    later = [*messages, {"role": "tool", "content": "y"}]
    assert "hm" not in tokenizer.apply_chat_template(later, tokenize=False)


def test_tasks_follow_from_the_seed() -> None:
    assert prompt_table(4, seed=3).equals(prompt_table(4, seed=3))
    assert not prompt_table(4, seed=3).equals(prompt_table(4, seed=4))
