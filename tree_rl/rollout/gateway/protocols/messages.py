"""Chat messages in one form for all protocols."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

IMAGE_MARK = re.compile("\ue000image [0-9a-f]{32}\ue001")
"""Pattern of the text that replaces an image in a message until the gateway knows whether its model reads images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalledTool:
    """One tool call in an assistant message."""

    id: str = ""
    """Empty until the gateway gives one, and where a client sends none."""
    name: str
    arguments: Mapping[str, Any] | str
    """Decoded arguments; text as sent if it is not a JSON object."""
    written_id: str | None = None
    """Id that the model wrote, for the chat template; None if it wrote none, and for a client's call."""

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text, as in OpenAI's API."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One message."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str | None = None
    """Reasoning of an assistant, separate from its text; None if there is none."""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    name: str | None = None


def read_arguments(text: str) -> Mapping[str, Any] | str:
    """Decode the arguments of a tool call. Returns text that is not a JSON object unchanged."""
    try:
        decoded = decode_json(text)
    except JsonError:
        return text
    return decoded if isinstance(decoded, dict) else text


@dataclass(frozen=True, kw_only=True, slots=True)
class SentImage:
    """An image of a request."""

    url: str
    """Its content as a `data:` URL, else where it is."""
    line: str
    """What models of text read instead."""
    field: str


class Media:
    """Parts of a request that are not text; `left_out` begins with the names of other ignored parts."""

    def __init__(self, left_out: Iterable[str] = ()) -> None:
        self.left_out = [*left_out]
        self.images: dict[str, SentImage] = {}
        """Images by their marks in the messages."""

    def shown(self, kind: str, name: str, *, url: str = "", field: str) -> str:
        """The text that replaces an image, a sound or a file: for an image its mark."""
        line = unseen(kind, name)
        if kind != "image":
            self.left_out.append(kind)
            return line
        mark = f"\ue000image {hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}\ue001"
        self.images[mark] = SentImage(url=url, line=line, field=field)
        return mark


def unseen(kind: str, name: str = "") -> str:
    """The text that replaces an image, a sound or a file."""
    return f"[{kind}{': ' * bool(name)}{name} left out: this model reads text alone]"
