"""Reading requests that repeat earlier ones and go on: only what is new is decoded and checked.

Agents send their whole conversation with every call. Messages whose JSON is, character for character, what an earlier
request began with are taken from there.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tree_rl.rollout.gateway.fields import Fields, read_json, refuse_constant
from tree_rl.rollout.gateway.messages import KEPT, ChatMessage

LIST = re.compile(r'"messages"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*')
BETWEEN = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
DECODER = json.JSONDecoder(parse_constant=refuse_constant)


@dataclass(kw_only=True, slots=True)
class Heard:
    """The messages of a request, and what earlier requests know of them."""

    text: str = ""
    """The body up to its last message's end."""
    ends: list[int] = field(default_factory=list)
    """Where each message ends in `text`."""
    sent: list[Any] = field(default_factory=list)
    """The messages, decoded."""
    read: list[tuple[ChatMessage, ...]] = field(default_factory=list)
    """What an API reads from each of the first messages."""

    def messages(self, fields: Fields, read: Callable[[Fields], Sequence[ChatMessage]]) -> list[ChatMessage]:
        """Read the list `messages` of a request, as far as it is not known.

        Args:
            fields: the request.
            read: reads one message.

        Raises:
            RequestError: no list, or a message that cannot be read.
        """
        known = len(self.read)
        new = fields.objects("messages", required=True, start=known)
        self.read += [tuple(read(message)) for message in new]
        return [message for messages in self.read for message in messages]


class RequestMemory:
    """The latest requests of a session to one API."""

    def __init__(self) -> None:
        self._recent: list[Heard] = []
        # Nobody else can write it, so where it is found in a decoded body tells what its place means.
        self._mark = secrets.token_hex(16)

    def load(self, body: bytes) -> tuple[Any, Heard]:
        """Decode a body, as `read_json` does.

        Args:
            body: of a request.

        Returns:
            The body, and its messages as far as earlier requests know them.

        Raises:
            RequestError: not UTF-8, or not JSON.
        """
        try:
            found = self._load(body.decode("utf-8"))
        except (ValueError, RecursionError):
            found = None
        # What does not look like a conversation, or is not JSON, is read by the book, with its complaints.
        return (read_json(body), Heard()) if found is None else found

    def keep(self, heard: Heard) -> None:
        """Remember the messages of a request that was read without a complaint, so that all of them are objects."""
        if not heard.ends or len(heard.ends) != len(heard.read):
            return
        others = [old for old in self._recent if not heard.text.startswith(old.text)]
        self._recent = [*others[1 - KEPT :], heard]

    def _load(self, text: str) -> tuple[Any, Heard] | None:
        start = LIST.search(text)
        if start is None:
            return None
        heard = self._known(text)
        position = heard.ends[-1] if heard.ends else start.end()
        while True:
            if heard.ends:
                between = BETWEEN.match(text, position)
                if between is None:
                    break
                position = between.end()
            message, position = DECODER.raw_decode(text, position)
            heard.sent.append(message)
            heard.ends.append(position)
        # The rest of the body, the messages replaced by one that only stands there if this list is the body's own.
        body = DECODER.decode(f'{text[: start.end()]}"{self._mark}"{text[position:]}')
        if not isinstance(body, dict) or body.get("messages") != [self._mark]:
            return None
        body["messages"] = heard.sent
        heard.text = text[:position]
        return body, heard

    def _known(self, text: str) -> Heard:
        """The first messages of a body, as far as an earlier one began with the same text."""
        best, count = Heard(), 0
        for old in self._recent:
            if len(old.ends) > count and text.startswith(old.text[: old.ends[count]]):
                best, count = old, self._shared(old, text)
        return Heard(ends=best.ends[:count], sent=best.sent[:count], read=best.read[:count])

    def _shared(self, old: Heard, text: str) -> int:
        if text.startswith(old.text):
            return len(old.ends)
        return bisect_left(old.ends, True, key=lambda end: not text.startswith(old.text[:end]))
