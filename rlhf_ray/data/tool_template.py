"""A chat template with tools for models that are made here, of the kind that Qwen2.5 has: calls within <tool_call>,
results within <tool_response>, every turn between <|im_start|> and <|im_end|>. It is append-only: what follows a turn
does not change how the turn is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TOOL_TEMPLATE = r"""
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set talk = messages[1:] %}
{%- else %}
    {%- set system = 'You are a helpful assistant.' %}
    {%- set talk = messages %}
{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
    {{- '\n\n# Tools\n\nThe tools, as JSON schemas:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nTo call a tool, write:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in talk %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content or not message.tool_calls %}
            {{- '\n' + (message.content or '') }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()
"""Takes `tools` as JSON schemas, and of a message `tool_calls` in OpenAI's form: with or without `function`, and with
`arguments` as an object or as the text of one."""


def give_tool_template(directory: Path | str) -> PreTrainedTokenizerBase:
    """Give the tokenizer in `directory` this template and its tokens, and save it there again.

    The six tokens get the next free ids; a turn's end becomes the end of sequence. Those around calls and results are
    no special tokens, so that a text decoded without special tokens still has them, as Qwen's have it.
    """
    from transformers import AddedToken, AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"eos_token": TURN_END, "additional_special_tokens": [TURN_START]})
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TAGS])
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer
