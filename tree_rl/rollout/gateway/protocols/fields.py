"""Reads JSON requests field by field. Each error names the field, what was expected and what was received."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

SHOWN = 60
MAX_INTEGER = 2**31 - 1
"""Largest 32-bit integer: model servers store numbers in 32 bits."""
MAX_STOP_TEXTS = 64
MAX_ITEMS = 20_000
"""Most items of a list. Python takes 20 ms to free 200,000 messages."""


class RequestError(ValueError):
    """A request that the gateway cannot answer.

    `field` is the path of the wrong field, such as `messages[2].content`, `code` a short reason for programs.
    """

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, code: str = "invalid_request"
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.status = status
        self.code = code


class Fields:
    """A JSON object and its path in the request, which errors name; empty for the whole request.

    Raises `RequestError` if `value` is not an object.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise wrong(path or "body", "a JSON object", value)
        self._value = value
        self._path = path

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def names(self) -> Sequence[str]:
        return tuple(self._value)

    def raw(self, key: str) -> Any:
        """The field as sent; None if it is absent."""
        return self._value.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Required unless there is a default."""
        value = self._value.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise wrong(self.name(key), "a string", value)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self._value.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self.name(key), "true or false", value)
        return value

    def number(self, key: str, *, low: float, high: float | None = None) -> Any:
        """A number within bounds, None if it is absent; a whole one if `low` is an integer."""
        value = self._value.get(key)
        if value is None:
            return None
        is_whole = isinstance(low, int)
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not is_number or value < low or (high is not None and value > high):
            whole = f"a whole number of at least {low}" + ("" if high is None else f" and at most {high}")
            raise wrong(self.name(key), whole if is_whole else f"a number from {low} to {high}", value)
        return value if is_whole else float(value)

    def numbers(self, bounds: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
        """The numbers that are given, each within its bounds."""
        read = {key: self.number(key, low=low, high=high) for key, (low, high) in bounds.items()}
        return {key: value for key, value in read.items() if value is not None}

    def stop_texts(self, key: str) -> tuple[str, ...]:
        """One stop text or a list of them."""
        value = self._value.get(key)
        texts = [value] if isinstance(value, str) else self.items(key)
        if len(texts) > MAX_STOP_TEXTS or not all(isinstance(text, str) and text for text in texts):
            raise wrong(self.name(key), f"a text or a list of texts, at most {MAX_STOP_TEXTS}", texts)
        return tuple(texts)

    def items(self, key: str, *, required: bool = False) -> Sequence[Any]:
        """A list. Empty if it is absent and not required."""
        value = self._value.get(key)
        if value is None and not required:
            return ()
        if not isinstance(value, list):
            raise wrong(self.name(key), "a list", value)
        if len(value) > MAX_ITEMS:
            raise RequestError(f"expected at most {MAX_ITEMS} items, received {len(value)}", field=self.name(key))
        return value

    def objects(self, key: str, *, required: bool = False) -> list["Fields"]:
        name = self.name(key)
        return [type(self)(item, f"{name}[{index}]") for index, item in enumerate(self.items(key, required=required))]

    def child(self, key: str) -> "Fields":
        return type(self)(self._value.get(key), self.name(key))

    def part(self, key: str) -> "Fields":
        """An object, empty if it is absent."""
        return type(self)({} if self._value.get(key) is None else self._value[key], self.name(key))


def wrong(field: str, expected: str, received: Any) -> RequestError:
    """The error for a field that is missing or of the wrong type."""
    if received is None:
        return RequestError(f"expected {expected}, received nothing", field=field)
    shown = json.dumps(received, default=str)
    return RequestError(f"expected {expected}, received {shown[:SHOWN]}{'...' * (len(shown) > SHOWN)}", field=field)


def read_json(body: bytes) -> Any:
    """Decode a request's body. Raises `RequestError` if it is not UTF-8, or JSON that `plain_json` refuses."""
    try:
        # Some Windows clients send a byte order mark.
        return decode_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RequestError(f"expected UTF-8, received byte {body[error.start]:#04x} at {error.start}") from error
    except JsonError as error:
        raise RequestError(str(error), field=error.key) from error
