"""Reasoning as an opaque token that clients carry: OpenAI's `encrypted_content`, Gemini's `thoughtSignature`.

The token is not secret. It is the reasoning itself, so that it outlives what a session remembers.
"""

import base64
import binascii

MARK = b"tree_rl/1:"
"""Begins every token before it is encoded. Tokens of other servers lack it."""


def seal(reasoning: str) -> str:
    """The token of a reasoning, in base64."""
    return base64.b64encode(MARK + reasoning.encode("utf-8", "replace")).decode("ascii")


def unseal(token: str) -> str | None:
    """The reasoning of a token; None for a token that another server made. Clients change the alphabet and padding."""
    plain = token.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        opened = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        return opened.removeprefix(MARK).decode("utf-8") if opened.startswith(MARK) else None
    except (binascii.Error, ValueError):
        return None
