"""Preference pairs in TRL's formats become rows; what cannot train is refused by file and row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from sft_harness import write
from transformers import AutoTokenizer

from tree_rl.verl_plugin.dpo.preference_rows import SIDES, PreferenceRows, read_preferences

Read = Callable[..., PreferenceRows]
ASKED, DIGITS, WORDS = (
    {"role": role, "content": text} for role, text in (("user", "Count."), ("assistant", "123"), ("assistant", "no"))
)
CALLED, RESULT = {"role": "assistant", "content": "look"}, {"role": "user", "content": "result"}


@pytest.fixture(scope="module")
def tokenizer(toy: Path) -> Any:
    return AutoTokenizer.from_pretrained(toy / "model")


@pytest.fixture
def read(tokenizer: Any, tmp_path: Path) -> Read:
    def from_columns(options: dict[str, Any] | None = None, **columns: Any) -> PreferenceRows:
        path = write(tmp_path / "pairs.parquet", **columns)
        return read_preferences(str(path), tokenizer, options or {}, vocab_size=len(tokenizer))

    return from_columns


def rows_of(found: PreferenceRows) -> list[list[tuple[list[int], list[int]]]]:
    return [[(ids.tolist(), mask.tolist()) for ids, mask in pair] for pair in found.pairs]


def test_messages_with_the_prompt_apart_or_not_and_as_json(read: Read, tokenizer: Any) -> None:
    apart = read(prompt=[[ASKED]], chosen=[[DIGITS]], rejected=[[WORDS]])
    together = read(chosen=[[ASKED, DIGITS]], rejected=[[ASKED, WORDS]])
    text = '[{"role": "user", "content": "Count."}, {"role": "assistant", "content": "%s"}]'
    as_json = read(chosen=[text % "123"], rejected=[text % "no"])
    as_ultra_feedback = read(prompt=["Count."], chosen=[[ASKED, DIGITS]], rejected=[[ASKED, WORDS]])
    twice = read(prompt=[[ASKED]], chosen=[[ASKED, DIGITS]], rejected=[[ASKED, WORDS]])
    assert rows_of(apart) == rows_of(together) == rows_of(as_json) == rows_of(as_ultra_feedback) == rows_of(twice)
    start = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
    for answer, (ids, mask) in zip((DIGITS, WORDS), rows_of(apart)[0], strict=True):
        assert ids == tokenizer.apply_chat_template([ASKED, answer], return_dict=False)
        assert mask == [0] * len(start) + [1] * (len(ids) - len(start))


@pytest.mark.parametrize(
    ("prompt", "start"), (([[ASKED]], []), (None, [ASKED]), (["Count."], [ASKED]), ([[ASKED]], [ASKED]))
)
def test_a_column_of_system_texts_is_before_the_prompt(read: Read, prompt: Any, start: list[Any]) -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = read(prompt=[[system, ASKED]], chosen=[[DIGITS]], rejected=[[WORDS]])
    columns = {"chosen": [[*start, DIGITS]], "rejected": [[*start, WORDS]], "system": ["Be brief."]}
    assert rows_of(read(**columns, **({"prompt": prompt} if prompt else {}))) == rows_of(expected)
    own = {"prompt": [[system, ASKED]], "chosen": [[DIGITS]], "rejected": [[WORDS]], "system": ["Be long."]}
    assert rows_of(read(**own)) == rows_of(expected)


def test_answers_may_begin_with_a_short_prompt(read: Read) -> None:
    assert rows_of(read(prompt=[[5, 6]], chosen=[[5, 6, 7]], rejected=[[5, 6]]))[0][0][0] == [5, 6, 5, 6, 7]


def test_only_turns_of_the_assistant_are_trained(read: Read, tokenizer: Any) -> None:
    found = read(prompt=[[ASKED]], chosen=[[CALLED, RESULT, DIGITS]], rejected=[[WORDS]])
    ids, mask = rows_of(found)[0][0]
    trained = tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if is_trained])
    assert "look" in trained and "123" in trained and "result" not in trained and "Count" not in trained


def test_texts_end_with_the_end_of_a_text(read: Read, tokenizer: Any) -> None:
    apart = read(prompt=["The sky is"], chosen=[" blue"], rejected=[" green"])
    together = read(chosen=["The sky is blue"], rejected=["The sky is green"])
    prompt, blue = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("The sky is", " blue"))
    expected = [*prompt, *blue, tokenizer.eos_token_id], [0] * len(prompt) + [1] * (len(blue) + 1)
    assert rows_of(apart)[0][0] == rows_of(together)[0][0] == expected


def test_token_ids_with_masks(read: Read) -> None:
    apart = read(prompt=[[5, 6]], chosen=[[7, 8, 9]], rejected=[[7]], chosen_mask=[[1, 0, 1]])
    assert rows_of(apart) == [[([5, 6, 7, 8, 9], [0, 0, 1, 0, 1]), ([5, 6, 7], [0, 0, 1])]]
    together = read(chosen=[[5, 6, 7, 8]], rejected=[[5, 6, 9]], chosen_mask=[[0, 1, 1, 1]])
    assert rows_of(together) == [[([5, 6, 7, 8], [0, 0, 1, 1]), ([5, 6, 9], [0, 0, 1])]]
    columns = {"prompt": [[5, 6]], "chosen": [[7, 8]], "rejected": [[9, 8]], "chosen_mask": [[0, 1]]}
    fixed = {name: pyarrow.array(value, pyarrow.list_(pyarrow.int64(), 2)) for name, value in columns.items()}
    assert rows_of(read(**fixed)) == rows_of(read(**columns))


def test_pairs_with_one_prompt_or_one_that_goes_on_are_a_group(read: Read) -> None:
    columns = {"prompt": [[5, 6], [5, 7], [5, 6], [5, 6, 9]], "chosen": [[1]] * 4, "rejected": [[2]] * 4}
    first, other, same, longer = read(**columns).group_of_pair.tolist()
    assert first == same == longer != other
    by_key = read({"group_key": "task"}, **columns, task=["a", "a", "b", "b"])
    assert by_key.group_of_pair.tolist() == [0, 0, 1, 1]
    branches = [[5, 6], [5, 6, 7], [4, 5], [5], [5, 6, 8], [6], [5, 6, 7]]
    groups = read(prompt=branches, chosen=[[1]] * 7, rejected=[[2]] * 7).group_of_pair
    assert len({groups[pair] for pair in (0, 1, 3, 4, 6)}) == 1 and len({*groups}) == 3
    long = [[3, *[0] * 1000, 3], [3, *[0] * 500, 1, *[0] * 499, 3]]
    by_prompt = read({"group_key": "prompt"}, prompt=[*long, long[0]], chosen=[[1]] * 3, rejected=[[2]] * 3)
    assert by_prompt.group_of_pair.tolist() == [0, 1, 0]


def test_rows_are_cut_on_the_right(read: Read) -> None:
    columns = {"prompt": [[5, 6]], "chosen": [[7, 8, 9]], "rejected": [[7]]}
    assert rows_of(read({"max_length": 4, "truncation": "right"}, **columns))[0][0] == ([5, 6, 7, 8], [0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"row 0: chosen: 5 tokens with the prompt exceed data\.max_length=4"):
        read({"max_length": 4}, **columns)
    with pytest.raises(ValueError, match=r"data\.truncation=left: expected error or right"):
        read({"max_length": 4, "truncation": "left"}, **columns)


GOOD: dict[str, list[Any]] = {"prompt": [[5, 6]] * 2, "chosen": [[7], [8]], "rejected": [[8], [7]]}
TEXTS: dict[str, list[Any]] = {"prompt": ["a"], "chosen": [" b"], "rejected": [" c"]}


@pytest.mark.parametrize(
    ("columns", "said"),
    (
        (GOOD | {"chosen": [[7], []]}, "row 1: chosen: expected an answer, received nothing"),
        (GOOD | {"chosen": [[7], None]}, "row 1, column chosen: expected a list of integers, received nothing"),
        (GOOD | {"chosen": [[7], [10**6]]}, r"row 1: chosen: expected ids in \[0, .* received 1000000 at 2"),
        (GOOD | {"chosen": [[7.0], [1.5]]}, "row 0: expected one of messages, a text, token ids in all columns"),
        ({"prompt": [1], "chosen": [2], "rejected": [3]}, "row 0: prompt: expected messages, a text or token ids"),
        (GOOD | {"prompt": ["a", "b"]}, "row 0: expected one of messages, a text, token ids in all columns"),
        (GOOD | {"chosen_mask": [[1], [1, 1]]}, "row 1: chosen_mask: expected 1 entries, received 2"),
        (GOOD | {"chosen_mask": [[1], [2]]}, "row 1, column chosen_mask: expected a list of 0 and 1, received 2"),
        (TEXTS | {"chosen_mask": [[1]]}, "row 0: chosen_mask and rejected_mask mark token ids, and this row has a"),
        (GOOD | {"chosen_mask": [[1], [0]]}, "row 1: chosen: expected a prompt and a trained token behind it"),
        (
            {"prompt": [[5, 6, 5, 6]], "chosen": [[5, 6, 5, 6, 7]], "rejected": [[5, 6, 5, 6, 8]]},
            r"row 0: prompt: expected it once, received \[5, 6, 5, 6\]",
        ),
        (
            {"prompt": ["Say:"], "chosen": ["Say: b"], "rejected": ["Say: c"]},
            "row 0: prompt: expected it once, received Say: also at the",
        ),
        (TEXTS | {"prompt": [""]}, "row 0: expected a prompt, or that chosen and rejected begin"),
        ({"chosen": [[1, 2]], "rejected": [[3, 4]]}, "row 0: expected a prompt, or that chosen and rejected begin"),
        (TEXTS | {"chosen": [[DIGITS]], "rejected": [[WORDS]]}, "row 0: expected a prompt, or that chosen and rej"),
        (
            GOOD | {"chosen": [[7], [7]]},
            r"row 1: chosen and rejected: expected two answers, received \[7\] twice; drop",
        ),
        (TEXTS | {"chosen": [" c"]}, "row 0: chosen and rejected: expected two answers, received  c twice; drop"),
        (
            {"prompt": [[ASKED]]} | {side: [[DIGITS]] for side in SIDES},
            "row 0: chosen and rejected: expected two answers",
        ),
        ({"chosen": [[1, 2]], "rejected": [[1, 2, 3]]}, "row 0: chosen: expected a prompt and a trained token"),
        ({"chosen": [[ASKED, {"role": "judge", "content": "x"}]], "rejected": [[ASKED, WORDS]]}, "row 0: chosen, mess"),
        ({"chosen": [[ASKED, RESULT]], "rejected": [[ASKED, WORDS]]}, "row 0: chosen: expected a prompt and a trained"),
    ),
)
def test_what_cannot_train_is_named(read: Read, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"pairs\.parquet: {said}"):
        read(**columns)


def test_a_row_longer_than_the_models_positions_is_named(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.parquet", prompt=[[1], [1, 2]], chosen=[[3], [4]], rejected=[[4], [5, 6]])
    with pytest.raises(ValueError, match=r"row 1: rejected: 4 tokens with the prompt exceed the model's 3 positions"):
        read_preferences(str(path), tokenizer, {}, vocab_size=len(tokenizer), max_positions=3)
