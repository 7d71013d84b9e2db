"""Run-length encoding of texts without digits."""

import re


def encode(text):
    if any(letter.isdigit() for letter in text):
        raise ValueError("digits cannot be encoded")
    if not text:
        return ""
    runs = []
    previous, count = text[0], 1
    for letter in text[1:]:
        if letter == previous:
            count += 1
        else:
            runs.append((count, previous))
            previous, count = letter, 1
    runs.append((count, previous))
    return "".join(f"{count}{letter}" for count, letter in runs)


def decode(code):
    if not re.fullmatch(r"(?:\d+\D)*", code):
        raise ValueError(f"no code: {code!r}")
    return "".join(int(count) * letter for count, letter in re.findall(r"(\d+)(\D)", code))
