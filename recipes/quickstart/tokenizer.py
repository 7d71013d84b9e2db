"""A small Qwen-style tokenizer, built offline from the words of the task.

Byte-level BPE, so any text encodes; every word of the task, and every digit with its leading space, is one token.
The chat template is like Qwen3's. It drops `reasoning_content` of earlier turns; it writes reasoning inside the text as
it is, so that the agent decides what to keep.
"""

from collections.abc import Iterable

import tiny_model
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (*tiny_model.SPECIAL, *tiny_model.MARKUP)

# A tool call's JSON frame, then a digit, a word, white space, anything else: each alternative may become one token.
PIECES = Regex(r'\{"name": "[a-z_]+", "arguments": \{"[a-z_]+": "|"\}\}| ?[0-9]| ?[A-Za-z_]+|\n+| |[^\sA-Za-z0-9_]+')

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool.function.name + ': ' + tool.function.description + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.last %}{{- '<think>\\n' + reasoning + '\\n</think>\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 768) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the task's own text.

    Args:
        texts: Rendered conversations or word lists; special tokens in them are cut out.
        vocab_size: Upper bound on the vocabulary, 256 bytes and the special tokens included.

    Returns:
        A fast tokenizer with Qwen's special tokens, `<|im_end|>` as end of sequence, and the chat template.
    """
    return tiny_model.build_tokenizer(
        CHAT_TEMPLATE,
        special=SPECIAL_TOKENS,
        texts=(_without_specials(text) for text in texts),
        vocab_size=vocab_size,
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(PIECES, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    )


def _without_specials(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text
