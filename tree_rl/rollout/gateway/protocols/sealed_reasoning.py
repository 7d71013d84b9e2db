"""Reasoning as an opaque token that clients send back: OpenAI's `encrypted_content`, Gemini's `thoughtSignature`.

The token is not encrypted. It contains the reasoning, so the session need not store it.
"""

import base64
import binascii

MARK = b"tree_rl/1:"
"""Prefix of every token before encoding. Tokens of other servers lack it."""


def seal(reasoning: str) -> str:
    """Encode reasoning as a base64 token."""
    return base64.b64encode(MARK + reasoning.encode("utf-8", "replace")).decode("ascii")


def unseal(token: str) -> str | None:
    """Decode a token; None for another server's. Clients may change base64's alphabet and padding."""
    plain = token.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        opened = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        return opened.removeprefix(MARK).decode("utf-8") if opened.startswith(MARK) else None
    except (binascii.Error, ValueError):
        return None
