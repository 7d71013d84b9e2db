"""The tokenizer's chat template, rendered as transformers renders it, in half the time.

Templates run in jinja's sandbox. Most of their time goes into its question whether an attribute is safe, asked anew for
every use; for built-in types and loops the answer depends on type and name alone and is remembered here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import NoneType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

PLAIN = frozenset({str, int, float, bool, NoneType})
OWN_OF_DICT = frozenset(dir(dict))
KNOWN = frozenset({str, int, float, bool, NoneType, list, tuple, dict, Namespace, LoopContext})


class ChatTemplate:
    """Renders conversations with a tokenizer's template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        options: passed to the template.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._compiled: dict[str, Template] = {}

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None, is_prompt: bool
    ) -> str:
        """Write a conversation.

        Args:
            messages: as templates read them.
            tools: offered to the model; None if there are none.
            is_prompt: end with the start of an assistant turn.

        Raises:
            ValueError: the tokenizer has no template.
            TemplateError: the template refuses the conversation.
        """
        # A tokenizer may have a template of its own for conversations with tools.
        source = self._tokenizer.get_chat_template(tools=tools)
        if source not in self._compiled:
            self._compiled[source] = self._environment.from_string(source)
        settings = {**self._tokenizer.special_tokens_map, **self._options}
        return self._compiled[source].render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=is_prompt, **settings
        )


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What jinja's own does, without its way through an exception for every key of a message.
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
    """The tag with which templates mark what an assistant said. Its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja's name for it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes HTML characters, which models never see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
