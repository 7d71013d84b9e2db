"""A real tiny model behind a real gateway: what the gateway's tests share."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HERE = Path(__file__).parent
WITHOUT_TLS = False
"""For clients: reading the certificates of the machine takes a tenth of a second each time."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes every message as it is."""
PARAGRAPH = """\
every unique token of the forest stands once; its segments are runs of tokens that the same rows share, and a position
is the depth of a token on its path. the model answers a question, a tool returns files, the agent goes on: look, read,
write, done. what the model wrote is trained where it was generated, what it was given is context."""
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}}
SHELL = {"type": "function", "function": {"name": "shell", "description": "Run a command.", "parameters": COMMAND}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@cache
def trained_vocabulary() -> str:
    """Qwen's special tokens and a few hundred merges, so that text has several spellings."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [(HERE.parents[1] / "LICENSE").read_text(), (HERE / "reasoning_chat.jinja").read_text(), *[PARAGRAPH] * 20]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_tokens(list(MARKUP))
    return backend.to_str()


def build_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of its own with the trained vocabulary and a chat template."""
    backend = Tokenizer.from_str(trained_vocabulary())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template or (HERE / "reasoning_chat.jinja").read_text()
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> "Qwen3ForCausalLM":
    """Two layers of width 64, random weights, float32."""
    # Its module takes seconds to import, which a gateway in a process of its own need not wait for.
    from tiny_sizes import sizes
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    usual = sizes(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, head_dim=16, pad_token_id=None)
    usual |= {"initializer_range": 0.02, "max_position_embeddings": 8192, "eos_token_id": tokenizer.eos_token_id}
    return Qwen3ForCausalLM(Qwen3Config(**usual, dtype="float32")).eval()


Script = Callable[[str], str | Sequence[int] | None]
"""Prompt text -> the turn that the model is made to write (an end token is added to text), None to sample."""


class TinyModel:
    """The model as a backend. A scripted turn is forced token by token; its log-probs are the model's own."""

    def __init__(
        self, model: "Qwen3ForCausalLM", tokenizer: PreTrainedTokenizerFast, script: Script | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.script = script or (lambda prompt: None)
        self.running = 0
        self.cancelled = 0
        self.version = 7
        self.prompts: list[list[int]] = []
        self.samplings: list[Mapping[str, Any]] = []
        self._generator = torch.Generator().manual_seed(0)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        prompt, temperature = list(prompt_ids), sampling.get("temperature", 1.0)
        self.prompts.append(prompt)
        self.samplings.append({**sampling, "max_tokens": max_tokens})
        forced = self.script(self.tokenizer.decode(prompt))
        if isinstance(forced, str):
            forced = [*self.tokenizer.encode(forced, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.running += 1
        try:
            if forced is not None:
                return self._force(prompt, list(forced[:max_tokens]), temperature)
            return await self._sample(prompt, max_tokens, temperature)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _force(self, prompt: list[int], ids: list[int], temperature: float) -> Generation:
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        scores = torch.log_softmax(logits / temperature, dim=-1)
        return self._generation(ids, scores.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist())

    async def _sample(self, prompt: list[int], max_tokens: int, temperature: float) -> Generation:
        ids: list[int] = []
        log_probs: list[float] = []
        cache, new = None, prompt
        while len(ids) < max_tokens and self.tokenizer.eos_token_id not in ids[-1:]:
            with torch.no_grad():
                output = self.model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            scores = torch.log_softmax(output.logits[0, -1] / temperature, dim=-1)
            new = torch.multinomial(scores.exp(), 1, generator=self._generator).tolist()
            ids += new
            log_probs.append(float(scores[new[0]]))
            await asyncio.sleep(0)
        return self._generation(ids, log_probs)

    def _generation(self, ids: list[int], log_probs: list[float]) -> Generation:
        reason = "stop" if self.tokenizer.eos_token_id in ids[-1:] else "length"
        drawn = {"token_ids": tuple(ids), "log_probs": tuple(log_probs), "finish_reason": reason}
        return Generation(**drawn, min_version=self.version, max_version=self.version)


def replayed_log_probs(model: "Qwen3ForCausalLM", row: Row, temperature: float = 1.0) -> list[float]:
    """Log-prob of every response token of a row, from one forward over the whole row."""
    ids = torch.tensor([row.token_ids])
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
    start = len(row.prompt_ids)
    return [float(scores[start + i - 1, token]) for i, token in enumerate(row.response_ids)]


def assert_confirmed(model: "Qwen3ForCausalLM", row: Row) -> None:
    """The model gives the trained tokens of a row the log-probs that the row has."""
    again = replayed_log_probs(model, row)
    for mask, recorded, replayed in zip(row.response_mask, row.response_log_probs, again, strict=True):
        assert not mask or abs(recorded - replayed) < 1e-4


def misspell(tokenizer: PreTrainedTokenizerFast, text: str, seed: int = 0) -> list[int]:
    """Ids of a text that the tokenizer would choose otherwise: some words in pieces."""
    pieces: list[int] = []
    generator = random.Random(seed)
    for token in tokenizer.encode(text, add_special_tokens=False):
        symbols = tokenizer.convert_ids_to_tokens(token)
        split = symbols not in MARKUP and symbols not in SPECIAL and len(symbols) > 1 and generator.random() < 0.5
        pieces += tokenizer.convert_tokens_to_ids(list(symbols)) if split else [token]
    return pieces


@asynccontextmanager
async def serving(backend: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> AsyncIterator[Gateway]:
    settings = {"max_context_tokens": 6000, "max_turn_tokens": 400, **options}
    async with Gateway(tokenizer=tokenizer, backend=backend, options=GatewayOptions(**settings)) as gateway:
        yield gateway


def trained_text(tokenizer: PreTrainedTokenizerFast, row: Row) -> str:
    """What a row trains, as text."""
    return tokenizer.decode([token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask])


def trained_texts(tokenizer: PreTrainedTokenizerFast, calls: Sequence[ModelCall]) -> list[str]:
    return [trained_text(tokenizer, row) for row in rows_of_calls(calls)]


def tool_result(message: Any, content: str, index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message.tool_calls[index].id, "content": content}


class Talk:
    """One session of a gateway, and the clients that speak to it."""

    record: RecordedSession
    """Of the closed session."""

    def __init__(self, gateway: Gateway, left: AsyncExitStack, **sampling: Any) -> None:
        self.gateway, self._left = gateway, left
        self.session = gateway.open_session(sampling={"temperature": 1.0, **sampling})
        self.endpoint = gateway.endpoint(self.session)

    def _until_the_end(self, client: Any, close: Any) -> Any:
        self._left.push_async_callback(close)
        return client

    @cached_property
    def openai(self) -> openai.AsyncOpenAI:
        given = {"base_url": self.endpoint.openai_url, "api_key": self.endpoint.token, "max_retries": 0}
        client = openai.AsyncOpenAI(**given, http_client=openai.DefaultAsyncHttpxClient(verify=WITHOUT_TLS))
        return self._until_the_end(client, client.close)

    @cached_property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        given = {"base_url": self.endpoint.url, "api_key": self.endpoint.token, "max_retries": 0}
        client = anthropic.AsyncAnthropic(**given, http_client=anthropic.DefaultAsyncHttpxClient(verify=WITHOUT_TLS))
        return self._until_the_end(client, client.close)

    @cached_property
    def http(self) -> httpx.AsyncClient:
        """Plain HTTP, with the session's key."""
        headers = {"authorization": f"Bearer {self.endpoint.token}"}
        client = httpx.AsyncClient(base_url=self.endpoint.url, headers=headers, timeout=60, verify=WITHOUT_TLS)
        return self._until_the_end(client, client.aclose)

    async def ask(self, messages: str | Sequence[Any], **options: Any) -> Any:
        """An answer of chat completions, to a question or to messages."""
        sent = [user(messages)] if isinstance(messages, str) else messages
        return await self.openai.chat.completions.create(model="m", messages=sent, **options)

    async def close(self) -> None:
        self.record = await self.gateway.close_session(self.session)


@asynccontextmanager
async def talking(backend: Any, **options: Any) -> AsyncIterator[Talk]:
    """A session, at whose end the model must find what it gave."""
    async with serving(backend, backend.tokenizer, **options) as gateway, AsyncExitStack() as left:
        talk = Talk(gateway, left)
        yield talk
        await talk.close()
    # An agent may ask for another temperature than that at which the check computes.
    if isinstance(backend, TinyModel) and options.get("sampling_from") != "agent":
        check_record(backend, talk.record)


def generated_edges(calls: Sequence[ModelCall]) -> dict[tuple[tuple[int, ...], int], float | None]:
    """Log-prob of every generated token behind its context."""
    return {
        (call.prompt_ids + call.response_ids[:place], token): call.log_probs and call.log_probs[place]
        for call in calls
        for place, token in enumerate(call.response_ids)
    }


def trained_edges(rows: Sequence[Row]) -> dict[tuple[tuple[int, ...], int], float | None]:
    """Log-prob of every trained token behind its context."""
    return {
        (row.token_ids[: len(row.prompt_ids) + place], token): row.response_log_probs and row.response_log_probs[place]
        for row in rows
        for place, (token, mask) in enumerate(zip(row.response_ids, row.response_mask, strict=True))
        if mask
    }


def check_record(backend: TinyModel, record: RecordedSession) -> None:
    """Every generated token is trained in its own context, nothing else is, and the log-probs are the model's."""
    rows = rows_of_calls(record.calls)
    assert trained_edges(rows).keys() == generated_edges(record.calls).keys()
    for row in rows:
        assert_confirmed(backend.model, row)
