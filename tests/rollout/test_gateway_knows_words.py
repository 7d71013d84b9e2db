"""Ids of ASCII text that come from known words are those of the tokenizer, whatever the text."""

from typing import Any

import pytest
from gateway_harness import MARKUP, SPECIAL, build_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tree_rl.rollout.gateway import known_words as module
from tree_rl.rollout.gateway.known_words import KnownWords, ascii_pattern, known_words
from tree_rl.rollout.gateway.rendering import Renderer

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt2": module.GPT2,
    "qwen3": QWEN3,
    "qwen3.5": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt4o": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
CORPUS = ["It's what we'LL say: the model's answers, THE MODEL.\n\n  x = y[0] + 1234  \t\r\n <a></a> -- ''' ;;;\n"] * 40
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIAL, *MARKUP, "<think", "<|im_end", "the", " model", "'s", "'LL", "  ", "\n", "\r\n", "\t"]
        ),
        st.characters(max_codepoint=127),
        st.sampled_from(
            ["0", "19", "12345", " x", "X", "''", "\x0b", "\x1c", "\x1f ", "\x85", "ſ", "ü\u0301", "K", "名"]
        ),
    ),
    max_size=24,
).map("".join)


def build(pattern: str, *, is_normalized: bool = False, **token: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(text, normalized=is_normalized, **token) for text in MARKUP])
    return backend


def of_tokenizer(backend: Tokenizer, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def known(backend: Tokenizer) -> KnownWords:
    words = known_words(backend)
    assert words is not None
    return words


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_known_words_give_the_ids_of_the_tokenizer(pattern: str, is_normalized: bool) -> None:
    backend = build(PATTERNS[pattern], is_normalized=is_normalized)
    words = known(backend)

    @given(TEXTS)
    @settings(max_examples=150)
    def check(text: str) -> None:
        expected = of_tokenizer(backend, text)
        # The second time all words are known.
        assert [words.encode(text), words.encode(text)] == ([expected] * 2 if text.isascii() else [None] * 2)

    check()


def test_the_renderer_gives_the_same_ids_with_known_words_and_without() -> None:
    fast, slow = (Renderer(build_tokenizer(), {}) for _ in range(2))
    assert fast._words is not None
    slow._words = None

    @given(st.lists(TEXTS.filter(bool), max_size=4))
    @settings(max_examples=150)
    def check(pieces: list[str]) -> None:
        assert fast.encode(pieces) == slow.encode(pieces)

    check()


def test_overlapping_added_tokens_are_found_as_the_tokenizer_finds_them() -> None:
    backend = build(QWEN3)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<a", "<a>b", "a>bc", "bcd", "aa", "aaa")])
    backend.add_tokens([AddedToken(text, normalized=True) for text in (">b", "cde", "x<a", "a>bcd")])
    words = known(backend)

    @given(st.text(alphabet="<a>bcdex ", max_size=16))
    @settings(max_examples=400)
    def check(text: str) -> None:
        assert words.encode(text) == of_tokenizer(backend, text)

    check()


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "normalizer", normalizers.Lowercase()),
        lambda one: setattr(one, "normalizer", normalizers.Sequence([normalizers.NFC()])),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda one: setattr(one, "pre_tokenizer", None),
        lambda one: setattr(one.model, "dropout", 0.5),
        lambda one: setattr(one, "encode_special_tokens", True),
        lambda one: one.enable_truncation(8),
        lambda one: one.enable_padding(),
        lambda one: one.add_tokens([AddedToken("<pad>", lstrip=True)]),
        lambda one: one.add_tokens([AddedToken("<pad>", rstrip=True)]),
        lambda one: one.add_tokens([AddedToken("word", single_word=True)]),
        lambda one: one.add_tokens([AddedToken("\u212a", normalized=True)]),  # becomes K
    ],
)
def test_a_tokenizer_that_does_more_is_asked(change: Any) -> None:
    backend = build(QWEN3)
    assert known_words(backend) is not None
    change(backend)
    assert known_words(backend) is None


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\p{P}+", r"\P{L}+", r"\p{^L}", r"\X", r"\h+", r"\d", r"\w+", r"[[a-z]x]", r"[a-z&&[b]]", r"[]a]", r"[^]a]"),
        *(
            r"a++",
            r"a+?",
            r"a{2}+",
            r"(a)",
            r"(?<n>a)",
            r"(?>a)",
            r"(?i)a",
            r"(?<=a)b",
            r"a|^b",
            r"b$",
            r".",
            r"[a",
            "a{,2}",
        ),
    ],
)
def test_a_pattern_that_engines_may_read_differently_is_not_taken(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORDS", 50)
    backend = build(QWEN3)
    words = known(backend)
    for number in range(60):
        text = "".join(f" {'xyz'[number % 3]}{'abcdefghij'[number % 10]}{'q' * part}" for part in range(8))
        assert words.encode(text) == of_tokenizer(backend, text)
        assert len(words._ids) <= 60
    long = "a" * (module.MAX_WORD + 1)
    assert words.encode(long) == of_tokenizer(backend, long) and long not in words._ids
    assert words.encode("a" * (module.MAX_CHARACTERS + 1)) is None
