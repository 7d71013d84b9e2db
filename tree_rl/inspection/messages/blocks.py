"""Message content in parts (text, reasoning, calls, results), as OpenAI, Anthropic and Gemini write them."""

import json
from dataclasses import dataclass, field
from typing import Any

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.messages.json_cells import decoded
from tree_rl.inspection.messages.roles import TOOL
from tree_rl.rollout.gateway.protocols.messages import unseen

TEXT = ("text", "input_text", "output_text", "refusal")
THOUGHT = ("thinking", "reasoning")
CALL = ("tool_use", "tool_call", "function_call", "functionCall")
RESULT = ("tool_result", "function_call_output", "functionResponse", "function_response")
MEDIA = (
    *("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio"),
    *("file", "input_file", "document", "inlineData", "inline_data", "fileData", "file_data"),
)
SOURCES = ("source", "url", "path", "data", "file_id", "image_url", "file_url", "file_data")
"""Fields of a medium that hold or name it, besides one named after its kind."""
KNOWN = {*TEXT, *THOUGHT, *CALL, *RESULT, *MEDIA, "redacted_thinking"}
"""Kinds of parts: the value of the field `type`, or in Gemini's parts the name of the only field."""


@dataclass(kw_only=True, slots=True)
class Blocks:
    """The parts of a message, sorted by kind."""

    parts: list[Any] = field(default_factory=list)
    """Texts, and media unchanged."""
    thoughts: list[str] = field(default_factory=list)
    """Reasoning texts."""
    calls: list[Any] = field(default_factory=list)
    """Tool calls, unchanged."""
    results: list[tuple[Any, str]] = field(default_factory=list)
    """(id or name of the call, text) of each tool result."""

    @property
    def content(self) -> Any:
        """One text, which all templates accept; with media the list of parts."""
        if all(isinstance(part, str) for part in self.parts):
            return "".join(self.parts)
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in self.parts]


def read_blocks(content: Any, role: str, where: str) -> Blocks:
    """Sort the content of a message by kind.

    Args:
        content: text, parts, an object, or parts as JSON text; a tool result that is an object becomes JSON text.
        role: role of the message. Text of a tool is never decoded, because the model read it as it is.
        where: beginning of error messages.

    Raises:
        RowFileError: a part of an unknown kind.
    """
    if content is None:
        return Blocks()
    if isinstance(content, str):
        parts = decoded(content) if role != TOOL else content
        if not (isinstance(parts, list) and parts and all(_is_written_part(part) for part in parts)):
            return Blocks(parts=[content])
        content = parts
    if isinstance(content, dict):
        inner = content.get("parts")
        content = inner if isinstance(inner, list) else [content] if _kind(content) else _as_json(content)
    if not isinstance(content, list) or (role == TOOL and not all(_kind(part) for part in content)):
        return Blocks(parts=[content if isinstance(content, str) else _as_json(content)])
    blocks = Blocks()
    for part in content:
        _sort(part, blocks, where)
    return blocks


def _sort(part: Any, blocks: Blocks, where: str) -> None:
    if isinstance(part, str):
        inner = decoded(part)
        if not _is_written_part(inner):
            blocks.parts.append(part)
            return
        part = inner
    kind = _kind(part)
    if kind is None:
        raise _unread(part, where)
    # Gemini's parts, and OpenAI's calls too, nest the content under a field named after the kind.
    held = part.get(kind)
    body = held if isinstance(held, dict) and kind in (*CALL, *RESULT) else part
    if kind in THOUGHT or (kind in TEXT and part.get("thought") is True):
        if said := _plain(part.get(kind)) or _plain(part.get("text")):
            blocks.thoughts.append(said)
    elif kind in TEXT:
        said = _plain(part.get("refusal" if kind == "refusal" else "text"))
        if said is None and any(part.get(name) for name in (kind, "text", "content", "value")):
            raise _unread(part, where)
        blocks.parts.append(said or "")
    elif kind in CALL:
        blocks.calls.append(body)
    elif kind in RESULT:
        named = next((body[name] for name in ("tool_use_id", "call_id", "id", "name") if body.get(name)), None)
        given = next((body[name] for name in ("content", "output", "response", "result") if name in body), None)
        blocks.results.append((named, text_of(read_blocks(given, TOOL, where).content)))
    elif kind in MEDIA:
        blocks.parts.append(_document_text(part) or part)


def _plain(said: Any) -> str | None:
    """A text, the one in the object that OpenAI's threads have in its place, or Mistral's texts; None otherwise."""
    if isinstance(said, list):
        texts = [_plain(piece.get("text")) if isinstance(piece, dict) else None for piece in said]
        return None if None in texts else "".join(map(str, texts))
    inner = said.get("value") if isinstance(said, dict) else said
    return inner if isinstance(inner, str) else None


def _unread(part: Any, where: str) -> RowFileError:
    return RowFileError(
        f"{where}: expected content in parts like text, thinking, tool_use or tool_result, received {quoted(part)}"
        "; correct it or write it as text"
    )


def text_of(content: Any) -> str:
    """Content as one text; media become the gateway's placeholder text, which a text model reads instead."""
    if isinstance(content, str):
        return content
    kinds = [_kind(part) for part in content]
    texts = zip(kinds, content, strict=True)
    return "".join(str(part.get("text", "")) if kind in TEXT else unseen(str(kind)) for kind, part in texts)


def _document_text(part: dict[str, Any]) -> str | None:
    """Text of a document part; None if its source is not text."""
    source = part.get("source")
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    return data if isinstance(data, str) else None


def _is_written_part(part: Any) -> bool:
    """True if an object in a text is a whole part; other JSON is an answer that is JSON itself."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in KNOWN:
        return False
    if kind in TEXT:
        return _plain(part.get("refusal" if kind == "refusal" else "text")) is not None
    # Chat templates put a medium where a part has its type alone.
    return kind not in MEDIA or len(part) == 1 or any(part.get(name) for name in (kind, *SOURCES))


def _kind(part: Any) -> str | None:
    """Kind of a part; None if it is not a known part."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str) and kind in KNOWN:
        return kind
    fields = (*TEXT, *CALL, *RESULT, *MEDIA) if kind is None else ()
    # Without a type, a field `text` that is not a text is one of a tool's own object.
    named = (name for name in fields if part.get(name) is not None)
    return next((name for name in named if name not in TEXT or isinstance(part[name], str)), None)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
