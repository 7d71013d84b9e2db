"""Renders chat templates as transformers does, but several times faster.

Templates run in jinja's sandbox, which checks at every use whether an attribute is safe. For built-in types and loops
the answer depends only on type and name, so we cache it (1.1 ms instead of 5.9 ms for 68,000 characters).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import NoneType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OWN_OF_DICT = frozenset(dir(dict))
PLAIN = frozenset({str, int, float, bool, NoneType})
KNOWN = PLAIN | {list, tuple, dict, Namespace, LoopContext}


class ChatTemplate:
    """A compiled chat template, with the values of its variables: control tokens, `enable_thinking`, ...

    Raises `jinja2.TemplateSyntaxError` if the source is not valid.
    """

    def __init__(self, source: str, settings: Mapping[str, Any]) -> None:
        self._template = _ENVIRONMENT.from_string(source)
        self._settings = dict(settings)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None, is_prompt: bool
    ) -> str:
        """As `Renderer.render`; raises `jinja2.TemplateError` if the template refuses the conversation."""
        return self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=is_prompt, **self._settings
        )


class _Sandbox(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Same result as jinja's method, which raises and catches an exception for every key of a message.
        kind = type(obj)
        if kind is dict and attribute not in OWN_OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if self._is_safe.get((kind, attribute)):
            value = getattr(obj, attribute, None)
            if value is not None and type(value) in PLAIN:
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) not in KNOWN:
            return super().is_safe_attribute(obj, attr, value)
        key = (type(obj), attr)
        if key not in self._is_safe:
            self._is_safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._is_safe[key]


class _Generation(Extension):
    """The tag that marks assistant text in templates; has no effect on its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's name for it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's filter escapes HTML characters, but models are trained on text without such escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


_ENVIRONMENT = _Sandbox()
