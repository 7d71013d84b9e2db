"""The tokenizer's chat template, rendered as transformers renders it, in a fraction of the time.

Templates run in jinja's sandbox. Most of their time goes into its question whether an attribute is safe, asked anew for
every use; for built-in types and loops the answer depends on type and name alone and is remembered here. With a memory,
messages that an earlier rendering has written are not written again.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import NoneType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tree_rl.rollout.gateway.template_memory import MEMORY, PLAIN, TemplateMemory
from tree_rl.rollout.gateway.template_reading import (
    PURE_FUNCTIONS,
    LoopRead,
    NotPureError,
    SearchRead,
    outer_loops,
    read_by_loop,
    read_by_search,
)

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
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Rounds, loopcontrols]
        )
        self._compiled: dict[str, Template] = {}
        self._remembering: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        is_prompt: bool,
        memory: TemplateMemory | None = None,
    ) -> str:
        """Write a conversation.

        Args:
            messages: as templates read them.
            tools: offered to the model; None if there are none.
            is_prompt: end with the start of an assistant turn.
            memory: of what was written before; nobody else may use it meanwhile, and `messages` come from it.

        Raises:
            ValueError: the tokenizer has no template.
            TemplateError: the template refuses the conversation.
        """
        # A tokenizer may have a template of its own for conversations with tools.
        source = self._tokenizer.get_chat_template(tools=tools)
        settings = {**self._tokenizer.special_tokens_map, **self._options}
        if memory is None:
            if source not in self._compiled:
                self._compiled[source] = self._environment.from_string(source)
            template = self._compiled[source]
        else:
            if source not in self._remembering:
                self._remembering[source] = self._environment.remembering(source)
            template = self._remembering[source]
            settings[MEMORY] = memory
        return template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=is_prompt, **settings
        )


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def remembering(self, source: str) -> Template:
        """A template whose loops recall what they wrote before, where that can be told."""
        tree = self._parse(source, None, None)
        named = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        named |= {macro.name for macro in tree.find_all(nodes.Macro)}
        rounds = self.extensions[_Rounds.identifier]
        if isinstance(rounds, _Rounds):
            for loop in list(outer_loops(tree.body)):
                rounds.rewrite(loop, PURE_FUNCTIONS - named)
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

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


class _Rounds(Extension):
    """Stands in rewritten loops, in front of and behind what a round of them does."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.read: list[LoopRead] = []
        """What each rewritten loop reads."""
        self.searches: list[SearchRead] = []
        """What each rewritten search reads."""

    def rewrite(self, loop: nodes.For, functions: frozenset[str]) -> None:
        """Let a loop recall its rounds, if what it reads tells when they are the same."""
        try:
            return self._rewrite_search(loop, read_by_search(loop, known_functions=functions))
        except NotPureError:
            pass
        try:
            read = read_by_loop(loop, known_functions=functions)
        except NotPureError:
            return
        if not isinstance(items := loop.iter, nodes.Expr):
            return
        memory, text = nodes.Name(MEMORY, "load"), f"{MEMORY}_text"
        values = nodes.List([nodes.Name(name, "load") for name in read.values])
        site, place = nodes.Const(len(self.read)), nodes.Name("loop", "load")
        written = nodes.Name(f"{MEMORY}_round", "store")
        writing = [
            nodes.AssignBlock(written, None, loop.body),
            nodes.Output([self.call_method("keep", [memory, nodes.Name(written.name, "load")])]),
        ]
        is_new = nodes.Test(nodes.Name(text, "load"), "none", [], [], None, None)
        recalled = [nodes.Output([nodes.Name(text, "load")])]
        self.read.append(read)
        loop.body = [
            nodes.Assign(nodes.Name(text, "store"), self.call_method("recall", [memory, site, place, items, values])),
            nodes.If(is_new, writing, [], recalled),
        ]

    def _rewrite_search(self, loop: nodes.For, read: SearchRead) -> None:
        """Let a search recall what it found."""
        memory, place = nodes.Name(MEMORY, "load"), nodes.Name("loop", "load")
        site, state = nodes.Const(len(self.searches)), nodes.Name(read.state, "load")
        items = nodes.Name(read.items, "load")
        values = nodes.List([nodes.Name(name, "load") for name in read.values])
        self.searches.append(read)
        is_known = self.call_method("recall_search", [memory, site, place, items, state, values])
        end = nodes.ExprStmt(self.call_method("end_search", [memory, site, place, state]))
        loop.body = [nodes.If(is_known, [nodes.Break()], [], []), *loop.body, end]

    def recall_search(
        self, memory: TemplateMemory, site: int, loop: LoopContext, items: Any, state: Any, values: list[Any]
    ) -> bool:
        """In front of a round of a search."""
        return memory.recall_search(site, self.searches[site], loop, items, state, values)

    def end_search(self, memory: TemplateMemory, site: int, loop: LoopContext, state: Any) -> None:
        """Behind it."""
        memory.end_search(site, self.searches[site], loop, state)

    def recall(self, memory: TemplateMemory, site: int, loop: LoopContext, items: Any, values: list[Any]) -> str | None:
        """In front of a round."""
        return memory.recall(site, self.read[site], loop, items, values)

    def keep(self, memory: TemplateMemory, text: str) -> str:
        """Behind it."""
        return memory.keep(text)


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
