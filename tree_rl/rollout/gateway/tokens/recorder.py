"""Makes a session's prompts from recorded tokens, and records its calls."""

import asyncio
import re
from dataclasses import dataclass, replace
from functools import cache, partial

from tree_rl.rollout.gateway.backend import Answer
from tree_rl.rollout.gateway.calls.side_calls import side_call_of
from tree_rl.rollout.gateway.dialects.dialect import CallFault
from tree_rl.rollout.gateway.long_work import READ, TOKENIZE, off_the_loop
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.context_trie import ContextTrie, GeneratedTurn, Match, Node
from tree_rl.rollout.gateway.tokens.drift import BranchCause, DriftKind, DriftReport, find_drifted_siblings
from tree_rl.rollout.gateway.tokens.openings import opened_prompt, shown_to_client
from tree_rl.rollout.gateway.tokens.own_turns import OwnTurns, Restored
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import ModelCall

CHARACTERS_OF_A_MESSAGE = 160
"""Cost of rendering an empty message, in characters of text."""
FOLLOWER = "what-follows-a-turn"
"""Text of the message that follows a turn when we render the turn in the middle of a conversation."""
LONGEST_TOKENS = 6
"""Characters per token at which a text is probably too long; then we first tokenize only its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The model's input for a request."""

    request: ChatRequest
    restored: Restored
    """The request's messages, with the reasoning that clients drop."""
    text: str
    """Prompt as rendered by the template."""
    ids: tuple[int, ...]
    node: Node
    opening: str = ""
    """End of `text` that already belongs to the turn, because the client or the gateway started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAnswer:
    """What an answer says; ids of its calls follow when it is recorded."""

    message: ChatMessage
    shown: ChatMessage
    """The message without what the client began."""
    fault: CallFault | None

    def with_ids(self, prefix: str) -> "ReadAnswer":
        """The reading whose calls have ids that begin with `prefix`."""

        def named(message: ChatMessage) -> ChatMessage:
            calls = tuple(replace(one, id=f"{prefix}_{n}") for n, one in enumerate(message.tool_calls))
            return replace(message, tool_calls=calls)

        return replace(self, message=named(self.message), shown=named(self.shown))


class Recorder:
    """Makes prompts and records answers."""

    def __init__(self, session: str, *, renderer: Renderer, options: GatewayOptions) -> None:
        self.calls: list[ModelCall] = []
        self._session = session
        self._renderer = renderer
        self._options = options
        self._trie = ContextTrie(renderer)
        self._own = OwnTurns()
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._returned: dict[Node, str] = {}
        """Turns that came back, as rendered in the first prompt that contains them."""
        self._branch_causes: dict[int, BranchCause] = {}
        self._guessed: set[int] = set()
        self._unread: dict[int, CallFault] = {}

    def drift_report(self) -> DriftReport:
        returned: dict[int, DriftKind] = {}
        for node, written in self._returned.items():
            if node.turn is not None and self._is_tokenized_otherwise(node, written):
                returned[node.turn.call] = "retokenized" if written == node.turn.raw_text else "rewritten"
        return DriftReport(
            returned=returned,
            was_reused=self._options.on_drift == "reuse",
            siblings=find_drifted_siblings(self.calls, self._renderer.decode),
            branch_causes=self._branch_causes,
            guessed=tuple(sorted(self._guessed)),
            unread=self._unread,
        )

    async def make_prompt(self, request: ChatRequest) -> Prompt:
        """Make the prompt of a request, and note the generated turns that came back in it.

        Raises `RequestError` if the template refuses the messages, or the prompt leaves no room for an answer.
        """
        prompt, match = await self._prompt(request)
        for turn, written in match.turns:
            self._returned.setdefault(turn, written)
        self._note_branching_turns(prompt.restored, prompt.text, match)
        self._note_other_ends(match)
        return prompt

    async def count_tokens(self, request: ChatRequest) -> int:
        """Number of tokens of a request's prompt, which no call follows. Errors as in `make_prompt`."""
        prompt, _ = await self._prompt(request)
        return len(prompt.ids)

    async def _prompt(self, request: ChatRequest) -> tuple[Prompt, Match]:
        """The prompt of a request, whose text the trie then contains, and what the trie knew of it before."""
        # The thread only changes state that does not depend on the order of calls.
        rendered = request.num_bytes + CHARACTERS_OF_A_MESSAGE * len(request.messages)
        characters = self._trie.searched_characters(rendered)
        matched = await off_the_loop(partial(self._matched, request), READ, characters=characters)
        restored, (text, opening), match = matched
        pieces, encoded = await self._tokenized(match)
        node = self._trie.extend(match, pieces, encoded)
        ids = node.path_ids()
        if self._options.on_drift == "branch":
            ids = await off_the_loop(partial(self._retokenized, text), TOKENIZE, characters=len(text))
        self._check_length(len(ids))
        return Prompt(request=request, restored=restored, text=text, ids=ids, node=node, opening=opening), match

    def _matched(self, request: ChatRequest) -> tuple[Restored, tuple[str, str], Match]:
        """A request's messages with the reasoning that clients drop, (text, opening) of its prompt, and its match."""
        restored = self._own.restore(request.messages, agent=request.agent)
        text, opening = opened_prompt(self._renderer, request, restored.messages)
        if request.continues_last:
            restored = self._own.restore(request.messages[:-1], agent=request.agent)
        return restored, (text, opening), self._trie.match(text)

    def _note_branching_turns(self, restored: Restored, text: str, match: Match) -> None:
        """Record turns that this prompt contains without continuing their tokens, and why."""
        self._guessed.update(restored.guessed + restored.unclear)
        for call in restored.edited:
            self._branch_causes.setdefault(call, "edited")
        for call in restored.unclear:
            self._branch_causes.setdefault(call, "rewritten")
        continued = {node.turn.call for node, _ in match.turns if node.turn is not None}
        left = next((call for call in restored.own_calls if call not in continued), None)
        if left is None or left in self._branch_causes:
            return
        own = self._own.of_call(left)
        if not {*restored.edited, *restored.unclear}.isdisjoint(own.history.own_calls):
            return  # The branch starts at that earlier turn.
        reasoning = (own.message.reasoning or "").strip()
        closed = re.escape(reasoning) + r"\s*" + re.escape(self._renderer.dialect.reasoning_end)
        is_kept = not reasoning or left in restored.moved or re.search(closed, text)
        self._branch_causes[left] = "rewritten" if is_kept else "reasoning_dropped"

    def _note_other_ends(self, match: Match) -> None:
        """Record turns that this prompt ends with another token than the model did."""
        after, node = match.rest, match.node
        while node.parent is not None:
            if node.turn is not None:
                end = self._renderer.decode(node.turn.response_ids[len(node.ids) :])
                if after and not after.startswith(end) and not self._is_end_of_template(node.turn, end):
                    self._branch_causes.setdefault(node.turn.call, "other_end")
            after, node = node.text, node.parent

    def _is_end_of_template(self, turn: GeneratedTurn, end: str) -> bool:
        """True if the template ends the turn in this way elsewhere in a conversation."""
        closings = {closing for _, closing in turn.forms() if closing}
        return end in (closings or self._renderer.turn_ends[1:])

    async def reading(self, prompt: Prompt, answer: Answer) -> ReadAnswer:
        """Read an answer, which may take a while. Nothing is recorded."""
        read = partial(self.read, prompt, answer.text)
        message, fault = await off_the_loop(read, READ, characters=len(answer.text))
        shown = shown_to_client(prompt.request, message, opening=prompt.opening, dialect=self._renderer.dialect)
        return ReadAnswer(message=message, shown=shown, fault=fault)

    def record(
        self, prompt: Prompt, answer: Answer, reading: ReadAnswer, *, seconds: tuple[float, float]
    ) -> ChatMessage:
        """Record an answer, whole and at once, and return the message for the agent."""
        index, agent = len(self.calls), prompt.request.agent
        reading = reading.with_ids(f"call_{self._session}_{index}")
        side = side_call_of(self._options.side_calls, prompt.request)
        self.calls.append(
            ModelCall(
                prompt_ids=prompt.ids,
                response_ids=answer.token_ids,
                log_probs=answer.log_probs,
                turn=sum(message.role == "assistant" for message in prompt.restored.messages),
                agent=agent,
                side=None if side is None else side.name,
                weight=1.0 if side is None else side.weight,
                min_version=answer.min_version,
                max_version=answer.max_version,
                routes=answer.routes,
                finish_reason=answer.finish_reason,
                seconds=seconds,
            )
        )
        if reading.fault is not None:
            self._unread[index] = reading.fault
        turn = GeneratedTurn(
            call=index,
            raw_text=answer.text,
            response_ids=answer.token_ids,
            is_whole=answer.text_ids is not None,
            forms=cache(partial(self._forms, prompt, reading.message)),
        )
        self._trie.add_turn(prompt.node, ids=answer.text_ids or (), turn=turn)
        self._own.add(prompt.restored, reading.message, agent=agent, call=index)
        return reading.shown

    def read(self, prompt: Prompt, text: str) -> tuple[ChatMessage, CallFault | None]:
        """Read a turn: the message, including the opening, and the fault of a call that stayed text.

        If one call is broken, the whole turn is text, as from a stock server; a last call that the turn's end cut off
        stays text after the calls before it. `text` is what the model generated, without its end token.
        """
        text, tools = prompt.opening + text, prompt.request.tools
        turn = self._renderer.dialect.read(text, tools=tools, is_reasoning_open=self._opens_reasoning(prompt))
        fault, other_format = turn.fault, self._renderer.other_format
        if other_format and not turn.calls and fault is None and other_format(text, tools):
            fault = "other_format"
        thought, content = turn.reasoning, turn.content
        if self._options.reasoning == "inline":
            thought, content = None, turn.marked_reasoning + content
        elif thought is not None:
            content = content.strip()
        return ChatMessage(role="assistant", content=content, reasoning=thought, tool_calls=turn.calls), fault

    def _opens_reasoning(self, prompt: Prompt) -> bool:
        return self._renderer.dialect.opens_reasoning(prompt.text.removesuffix(prompt.opening))

    def _forms(self, prompt: Prompt, message: ChatMessage) -> tuple[tuple[str, str], ...]:
        """(turn, closing text) as the template renders them at the end and in the middle of a conversation.

        Templates start the last turn with empty reasoning, and drop it when another message follows. Only without
        reasoning is the middle form the same context, so turns with reasoning only have the form at the end.
        """
        messages, tools = prompt.restored.messages, prompt.request.tools
        thought = message.reasoning
        if thought is None:
            is_open = self._opens_reasoning(prompt)
            thought = self._renderer.dialect.read(message.content, tools=(), is_reasoning_open=is_open).reasoning
        is_silent = not (thought or "").strip()
        followers = [ChatMessage(role="user", content=FOLLOWER)] if is_silent else []
        if is_silent and message.tool_calls:
            followers.append(ChatMessage(role="tool", content=FOLLOWER, tool_call_id=message.tool_calls[0].id))
        try:
            opened = self._renderer.render(messages, tools=tools, is_prompt=True)
        except RequestError:
            return ()
        forms = []
        for after in ((), *((follower,) for follower in followers)):
            try:
                whole = self._renderer.render((*messages, message, *after), tools=tools, is_prompt=False)
            except RequestError:
                continue
            turn = self._renderer.turn_within(whole.rpartition(FOLLOWER)[0] if after else whole, opened)
            if turn is not None:
                forms.append(self._renderer.cut_end(turn, is_followed=bool(after)))
        # The opening is already in the prompt.
        opening = prompt.opening
        kept = [(form[0].removeprefix(opening), form[1]) for form in forms if form and form[0].startswith(opening)]
        return tuple(dict.fromkeys(kept))

    def _is_tokenized_otherwise(self, node: Node, written: str) -> bool:
        """True if a turn as it was written in a later prompt tokenizes to other ids than its own."""
        assert node.parent is not None
        # With the prompt's last piece, because a token may join its end with the turn's start.
        _, encoded = self._in_pieces(node.parent.text + written)
        return tuple(token for ids in encoded for token in ids) != node.parent.ids + node.ids

    async def _tokenized(self, match: Match) -> tuple[list[str], list[tuple[int, ...]]]:
        """The pieces of a prompt that no recorded token covers, and their ids. Raises for a prompt that is too long."""
        known = match.node.depth + (len(match.cut[1]) if match.cut else 0)
        limit = self._options.max_context_tokens
        beginning = match.rest[: LONGEST_TOKENS * limit]
        if len(beginning) < len(match.rest):
            # The tokenizer needs three seconds for 5 MB. The cut may split a word, so we allow 10 % over the limit.
            (ids,) = await asyncio.to_thread(self._renderer.encode, [beginning])
            if known + len(ids) > 1.1 * limit:
                self._check_length(known + len(ids))
        work = partial(self._in_pieces, match.rest)
        pieces, encoded = await off_the_loop(work, TOKENIZE, characters=len(match.rest))
        self._check_length(known + sum(map(len, encoded)))
        return pieces, encoded

    def _in_pieces(self, text: str) -> tuple[list[str], list[tuple[int, ...]]]:
        pieces = self._renderer.pieces(text)
        return pieces, self._renderer.encode(pieces)

    def _retokenized(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole prompt. Tokenizes only pieces that are new to the session."""
        pieces = self._renderer.pieces(text)
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._pieces]
        self._pieces.update(zip(new, self._renderer.encode(new), strict=True))
        return tuple(token for piece in pieces for token in self._pieces[piece])

    def _check_length(self, num_tokens: int) -> None:
        limit = self._options.max_context_tokens
        if num_tokens >= limit:
            raise RequestError(
                f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum (this model's maximum context length "
                f"is {limit} tokens, the answer included)",
                code="context_length_exceeded",
            )
