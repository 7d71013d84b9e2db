"""Writes a tiny Qwen3 with random weights whose vocabulary is that of the small software tasks.

Usage: PYTHONPATH=recipes:recipes/swe_tasks python recipes/swe_tasks/tiny_swe_model.py DIRECTORY [--seed 0]
"""

from generate import REQUEST, SYSTEM, build_tasks
from tiny_model import MARKUP, build_model, build_tokenizer, directory_and_seed
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool.function.name + ': ' + tool.function.description + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role != 'system' or not loop.first or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_swe_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the words of the repositories and prompts; tools have a place in the chat template."""
    tasks = build_tasks()
    texts = [text for task in tasks for text in (*task.files.values(), *task.solution_files.values())]
    texts += [SYSTEM, *(REQUEST.format(statement=task.problem_statement) for task in tasks)]
    return build_tokenizer(CHAT_TEMPLATE, added=MARKUP, texts=texts)


def main() -> None:
    """Write model and tokenizer to the directory."""
    arguments = directory_and_seed(__doc__)
    tokenizer = build_swe_tokenizer()
    tokenizer.save_pretrained(arguments.directory)
    model = build_model(tokenizer, seed=arguments.seed, width=128, max_position_embeddings=1 << 16)
    model.save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
