"""Which recorded tokens a prompt begins with, case by case, without server or model."""

from types import SimpleNamespace

import numpy as np
import pytest
from dictated_answers import Scene, said, user
from gateway_harness import CHATML, SHELL, SPECIAL, build_tokenizer, misspell, trained_text, trained_texts
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as decoding
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import rows_of_calls

USER, OPEN, CLOSE = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"


@pytest.fixture
def plain() -> Scene:
    return Scene(build_tokenizer(CHATML))


@pytest.fixture
def qwen(tiny: SimpleNamespace) -> Scene:
    return Scene(tiny.tokenizer)


def test_text_that_no_model_wrote_is_tokenized_as_a_whole_would_be(plain: Scene) -> None:
    plain.prompt(user("the forest"))
    plain.prompt(user("seg"))
    again = ([user("the"), user("the forest")], [user("the forest"), said("seg"), user("x")])
    for messages in ([user("segments")], [user("the forests")], *again):
        prompt = plain.prompt(*messages)
        assert list(prompt.ids) == plain.encode(prompt.text)


def test_a_turn_counts_only_where_it_ends_as_the_template_ends_it(qwen: Scene) -> None:
    qwen.answer([user("a")], "<think>\nx\n</think>\n\nforest \n")
    edited = qwen.prompt(user("a"), said("forest there"), user("b"))
    assert qwen.tokenizer.decode(edited.ids) == edited.text
    plain = Scene(build_tokenizer(CHATML + " "))
    plain.answer([user("a")], "forest")
    assert plain.tokenizer.decode(plain.prompt(user("a"), said("forestry"), user("b")).ids).startswith(
        f"{USER}a{CLOSE}{OPEN}forestry<|im_end|>"
    )


def test_a_turn_whose_template_text_is_shorter_is_not_taken_for_a_longer_one(plain: Scene) -> None:
    trimming = Scene(build_tokenizer(CHATML.replace("m.content", "m.content.strip()")))
    trimming.answer([user("a")], "forest   ")
    for sent in ("forest grows", "forest"):
        prompt = trimming.prompt(user("a"), said(sent), user("b"))
        spoken = trimming.tokenizer.decode(prompt.ids).split(OPEN)[1].split("<|im_end|>")[0]
        assert spoken == ("forest   " if sent == "forest" else sent)


@pytest.mark.parametrize("sent", ["done 🐍", "done 🐍!", "done", "done 🐢 and more", "done 名"])
def test_a_cut_never_falls_within_a_character_of_several_tokens(plain: Scene, sent: str) -> None:
    plain.answer([user("q")], "done 🐍 and more")
    prompt = plain.prompt(user("q"), said(sent), user("next"))
    assert plain.tokenizer.decode(prompt.ids) == prompt.text


def test_a_cut_does_not_force_an_odd_spelling_on_what_follows(qwen: Scene) -> None:
    qwen.answer([user("a")], "<think>\nforest\n</think>\n\nsegments")
    prompt = qwen.prompt(user("a"), said("<think>\n\n</think>\n\nother"))
    assert list(prompt.ids) == qwen.encode(prompt.text)
    assert prompt.ids[: len(prompt.ids)].count(qwen.encode("<think>")[0]) == 1


@pytest.mark.parametrize("seed", range(30))
def test_an_edited_turn_is_spelled_as_the_tokenizer_spells_the_whole(plain: Scene, seed: int) -> None:
    draw = np.random.default_rng(seed)
    turn = " ".join(draw.choice(["the", "forest", "segments", "seg", "ment", "for", "est", "there"], 6))
    plain.answer([user("a")], turn)
    edited = turn[: draw.integers(1, len(turn))] + "".join(draw.choice(list("stfr e"), 3)) + " end"
    prompt = plain.prompt(user("a"), said(edited), user("b"))
    assert list(prompt.ids) == plain.encode(prompt.text)


@pytest.mark.parametrize("order", [1, -1])
def test_of_turns_with_one_text_the_latest_comes_back(plain: Scene, order: int) -> None:
    spelled = [plain.encode("the forest"), misspell(plain.tokenizer, "the forest", seed=1)][::order]
    for turn in spelled:
        plain.answer([user("a")], turn)
    opening = len(plain.prompt(user("a")).ids)
    ids = list(plain.prompt(user("a"), said("the forest"), user("b")).ids)
    assert ids[opening : opening + len(spelled[1])] == spelled[1]


def test_an_edited_turn_of_bytes_that_are_no_characters_is_compared_with_few_looks(
    plain: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.answer([user("a")], plain.tokenizer.convert_tokens_to_ids(["ÿ"]) * 1000)
    decode, looks = plain.renderer.decode, []
    monkeypatch.setattr(plain.renderer, "decode", lambda ids: looks.append(len(ids)) or decode(ids))
    prompt = plain.prompt(user("a"), said("\ufffd" * 750 + "x"), user("b"))
    assert prompt.text == f"{USER}a{CLOSE}{OPEN}" + "\ufffd" * 750 + f"x{CLOSE}{USER}b{CLOSE}{OPEN}"
    assert len(looks) < 200


def test_turns_of_the_model_win_over_a_longer_stretch_of_rewritten_history(qwen: Scene) -> None:
    first = [user("a")]
    thought = qwen.answer(first, "<think>\nx\n</think>\n\nthe forest")
    qwen.answer([*first, thought, user("b")], "fine")
    spelled = misspell(qwen.tokenizer, "the forest", seed=1)
    assert spelled != qwen.encode("the forest")
    again = qwen.answer(first, spelled)
    prompt = qwen.prompt(*first, again, user("b"))
    start = len(qwen.encode(f"{USER}a{CLOSE}{OPEN}"))
    assert list(prompt.ids[start : start + len(spelled)]) == spelled


def test_a_turn_as_the_model_wrote_it_is_recognised_where_the_template_writes_it_otherwise_at_the_end(
    qwen: Scene,
) -> None:
    spelled = misspell(qwen.tokenizer, "the segments of the forest", seed=1)
    message = qwen.answer([user("a")], spelled)
    prompt = qwen.prompt(user("a"), message, user("b"))
    assert prompt.ids[len(qwen.encode(f"{USER}a{CLOSE}{OPEN}")) :][: len(spelled)] == tuple(spelled)
    scene = Scene(qwen.tokenizer, tools=(SHELL,))
    called = scene.answer([user("a")], '<tool_call>\n{"name": "shell", "arguments": {"command" :  "ls"}}\n</tool_call>')
    scene.prompt(user("a"), called, user("b"))
    for one, kind in ((qwen, "retokenized"), (scene, "rewritten")):
        assert one.recorder.drift_report().returned == {0: kind}


def test_a_stop_text_inside_a_token_leaves_the_rest_of_the_token_out(plain: Scene) -> None:
    ids = plain.encode("a forest segment")
    inside = plain.tokenizer.decode(ids[-1:])[-3:]
    plain.answer([user("a")], ids, stop=inside)
    visible = "a forest segment"[: -len(inside)]
    prompt = plain.prompt(user("a"), said(visible), user("b"))
    assert plain.tokenizer.decode(prompt.ids) == prompt.text
    start = len(plain.encode(f"{USER}a{CLOSE}{OPEN}"))
    assert list(prompt.ids[start : start + len(ids) - 1]) == ids[:-1]


def test_a_turn_ended_by_a_stop_text_goes_on_without_it(qwen: Scene) -> None:
    said_ids = misspell(qwen.tokenizer, "Thought: look at the forest\nObservation:")
    first = qwen.answer([user("a")], said_ids, stop="\nObservation:")
    qwen.answer([user("a"), first, user("b")], "Done")
    cut, whole = "Thought: look at the forest\nObservation:", "Thought: look at the forestDone<|im_end|>"
    assert trained_texts(qwen.tokenizer, qwen.recorder.calls) == [cut, whole]


def test_a_turn_cut_by_its_limit_goes_on_with_an_end_that_is_not_trained(plain: Scene) -> None:
    ids = plain.encode("the forest of segments and tokens")[:4]
    first = plain.answer([user("a")], ids, end="")
    plain.answer([user("a"), first, user("b")], "Done")
    (row,) = rows_of_calls(plain.recorder.calls)
    cut = plain.tokenizer.decode(ids)
    assert trained_text(plain.tokenizer, row) == f"{cut}Done<|im_end|>"
    assert plain.tokenizer.decode(row.token_ids).startswith(f"{USER}a{CLOSE}{OPEN}{cut}{CLOSE}{USER}b{CLOSE}{OPEN}Done")


def test_an_edited_turn_keeps_the_models_tokens_up_to_the_edit(plain: Scene) -> None:
    ids = misspell(plain.tokenizer, "the forest has segments and then some tokens", seed=3)
    plain.answer([user("a")], ids)
    plain.answer([user("a"), said("the forest has [...]"), user("b")], "ok")
    _, second = rows_of_calls(plain.recorder.calls)
    kept = trained_text(plain.tokenizer, second).removesuffix("ok<|im_end|>")
    assert "the forest has".startswith(kept) and len(kept) >= len("the forest ha")
    assert f"{OPEN}the forest has [...]{CLOSE}" in plain.tokenizer.decode(second.token_ids)


def llama_like() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space in front of a text's first word, as SentencePiece does."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoding.Metaspace(prepend_scheme="first")
    corpus = ["user assistant the forest of segments a b\n x : |"] * 3
    backend.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL]))
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


def test_a_tokenizer_that_treats_the_start_of_text_apart_still_goes_on_exactly() -> None:
    scene = Scene(llama_like())
    message = scene.answer([user("the forest")], scene.encode("<|im_end|>a b")[1:])
    prompt = scene.prompt(user("the forest"), message, user("segments"))
    assert list(prompt.ids) == scene.encode(prompt.text)
    edited = scene.prompt(user("the forest"), said("segments of"), user("segments"))
    assert list(edited.ids) == scene.encode(edited.text)


def test_a_tokenizer_that_cannot_be_cut_is_refused() -> None:
    tokenizer = build_tokenizer()
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **kwargs: encode(text.replace("<|im_end|> c", "<|im_end|>c"), **kwargs)
    with pytest.raises(ValueError, match="to tokenize piece by piece"):
        Renderer(tokenizer, {})
