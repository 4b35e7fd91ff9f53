"""Chat templates of the kinds that published models have, with tools, written after their behaviour, and small
tokenizers that have them.

| kind | what it does |
|---|---|
| qwen2.5 | keeps everything; results of tools stand in a turn of the user |
| qwen3 | leaves out the reasoning of turns before the last message of a user; writes an empty one in the last turn |
| llama3.1 | tools stand in the first message of the user; one call a turn, whose content is left out; role ipython |
| gemma | no system message, no tools, user and model take turns, contents are trimmed |
| mistral | tools stand before the last message of the user; ids of calls have nine characters |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_ray.data.tool_template import TOOL_TAGS, TOOL_TEMPLATE

QWEN3 = r"""
{%- set state = namespace(query=-1, open=true) %}
{%- for m in messages[::-1] %}
    {%- set at = messages | length - 1 - loop.index0 %}
    {%- set result = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') %}
    {%- if state.open and m.role == 'user' and not result %}
        {%- set state.open = false %}
        {%- set state.query = at %}
    {%- endif %}
{%- endfor %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0].content if messages[0].role == 'system' else '' }}
    {%- if tools %}
        {{- '\n\n# Tools\n<tools>' }}
        {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
        {{- '\n</tools>\nCalls: <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- set content = m.content %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\n' }}{% endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
""".strip()

LLAMA31 = r"""
{{- bos_token }}
{%- set talk = messages %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set talk = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- if not talk or talk[0].role != 'user' %}{{ raise_exception('no message of the user for the tools') }}{% endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer by a call {"name": NAME, "parameters": OBJECT}.\n\n' }}
    {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}
    {{- (talk[0].content | trim) + '<|eot_id|>' }}
    {%- set talk = talk[1:] %}
{%- endif %}
{%- for m in talk %}
    {%- if m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}' + ('<|eom_id|>' if builtin_tools is defined else '<|eot_id|>') }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
""".strip()

GEMMA = r"""
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}
    {{- (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
""".strip()

MISTRAL = r"""
{{- bos_token }}
{%- set talk = messages %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}
    {%- set talk = messages[1:] %}
{%- endif %}
{%- set state = namespace(last=-1) %}
{%- for m in talk %}
    {%- if m.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in talk %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == state.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system if loop.index0 == state.last else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- else %}
        {{- raise_exception('no role ' + m.role + ' here') }}
    {%- endif %}
{%- endfor %}
""".strip()


@dataclass(frozen=True)
class TemplateTraits:
    """A template and the tokens that it needs."""

    template: str
    end: str
    """Ends a turn of the assistant; the tokenizer's end of sequence."""
    special: tuple[str, ...] = ()
    """Further special tokens."""
    tags: tuple[str, ...] = ()
    """Added tokens that are not special."""
    begin: str | None = None
    """The tokenizer's beginning of sequence."""
    roles: tuple[str, ...] = field(default=("system", "user", "tool"))
    """That it knows, without the assistant's."""


THINK = ("<think>", "</think>")
KINDS = {
    "qwen2.5": TemplateTraits(TOOL_TEMPLATE, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), TOOL_TAGS),
    "qwen3": TemplateTraits(QWEN3, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), (*TOOL_TAGS, *THINK)),
    "llama3.1": TemplateTraits(LLAMA31, "<|eot_id|>", (
        "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"), (), "<|begin_of_text|>"),
    "gemma": TemplateTraits(GEMMA, "<end_of_turn>", ("<start_of_turn>", "<eos>"), (), "<bos>", ("user",)),
    "mistral": TemplateTraits(MISTRAL, "</s>", (
        "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]"), (), "<s>"),
}
CORPUS = ("the price of tea is 12 and the price of milk is 3\n", '{"name": "look_up", "arguments": {"word": "tea"}}\n',
          "user assistant system tool result: what is it? it is not in the table, so add 1 and 2.\n\n")


LINE_BREAKS_TOGETHER = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Divides texts before their bytes are merged, as the tokenizers of Llama 3 and Qwen do: line breaks stay together
whatever follows them."""


def make_chat_tokenizer(directory: Path | str, kind: str, texts: tuple[str, ...] = CORPUS,
                        vocab_size: int = 400) -> Any:
    """A byte-level tokenizer with the template of a kind and its tokens, saved to `directory`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    traits = KINDS[kind]
    core = Tokenizer(models.BPE())
    divide = pre_tokenizers.Split(Regex(LINE_BREAKS_TOGETHER), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [divide, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    core.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    begin = [traits.begin] if traits.begin else []
    special = [AddedToken(token, special=True, normalized=False) for token in (traits.end, *traits.special, *begin)]
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in traits.tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=traits.end, bos_token=traits.begin,
                                        clean_up_tokenization_spaces=False)
    tokenizer.chat_template = traits.template
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_sentencepiece_like_tokenizer(directory: Path | str, kind: str, scheme: str) -> Any:
    """A tokenizer that writes blanks as a part of words, with one put before texts: before each part between special
    tokens ("always"), or before the beginning alone ("first")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    traits = KINDS[kind]
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)  # type: ignore[assignment]
    core.decoder = decoders.Metaspace(prepend_scheme=scheme, split=True)  # type: ignore[assignment]
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], initial_alphabet=[chr(i) for i in range(10, 127)],
        show_progress=False))
    begin = [traits.begin] if traits.begin else []
    core.add_special_tokens([AddedToken(token, special=True, normalized=False)
                             for token in (traits.end, *traits.special, *begin)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token=traits.end,
                                        bos_token=traits.begin)
    tokenizer.chat_template = traits.template
    tokenizer.save_pretrained(directory)
    return tokenizer
