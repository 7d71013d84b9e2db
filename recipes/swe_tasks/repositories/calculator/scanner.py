import re


def scan(text):
    tokens = re.findall(r"\d+\.?\d*|[-+*/()]|\S", text)
    for token in tokens:
        if not re.fullmatch(r"\d+\.?\d*|[-+*/()]", token):
            raise ValueError(f"unexpected {token!r}")
    return tokens
