"""Tiny random models that look like those people train: what their files hold and how their tokenizers write chats.

Each has weights in several files with an index, more embeddings than its tokenizer has tokens, several tokens that end
a response (named in generation_config.json alone) and a chat template of its own kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PADDED = 96
"""Embeddings of every model here; tokenizers have fewer tokens."""
WORDS = ["system", "user", "assistant", "model", *(f"w{i}" for i in range(48))]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 1e4}

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nw0 w1<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
"""Brings a system message where none is given."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}")
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}")
"""Knows no system message, and calls the assistant a model."""
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set talk = messages[1:] %}{% else %}{% set talk = messages %}{% endif %}"
    "{% for m in talk %}{% if m.role == 'user' %}[INST] {% if loop.first and system is defined %}{{ system }}\n\n"
    "{% endif %}{{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant take turns') }}{% endif %}{% endfor %}")
"""Puts the system message into the first of the user's."""

KINDS: dict[str, dict[str, Any]] = {
    "qwen": {"family": "qwen2", "shape": {"tie_word_embeddings": True, "rope_parameters": YARN}, "template": QWEN,
             "special": ["<|im_start|>"], "ends": ["<|im_end|>", "<|endoftext|>"], "begin": None},
    "llama": {"family": "llama", "shape": {"rope_parameters": LLAMA3}, "template": LLAMA, "begin": "<|begin|>",
              "special": ["<|header|>", "<|/header|>"], "ends": ["<|eot|>", "<|end|>", "<|eom|>"]},
    "gemma": {"family": "gemma3_text", "shape": {
        "tie_word_embeddings": True, "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]},
        "template": GEMMA, "special": ["<turn>"], "ends": ["<eos>", "</turn>"], "begin": "<bos>"},
    "mistral": {"family": "mistral", "shape": {"sliding_window": None}, "template": MISTRAL,
                "special": ["[INST]", "[/INST]"], "ends": ["</s>", "</s2>"], "begin": "<s>"},
}
"""`ends`: tokens that end a response, the tokenizer's own first. `begin`: what it puts before plain texts."""


def make_real_tokenizer(directory: Path | str, kind: str) -> None:
    """Save the tokenizer of a kind: words at spaces, special tokens wherever they stand."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    traits = KINDS[kind]
    begin, ends = traits["begin"], traits["ends"]
    special = ["<pad>", *ends, *([begin] if begin else []), *traits["special"]]
    ids = {word: i for i, word in enumerate([*special, *WORDS])}
    core = Tokenizer(WordLevel(ids, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if begin:
        core.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, ids[begin])])  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=ends[0], pad_token="<pad>", bos_token=begin)
    tokenizer.chat_template = traits["template"]
    tokenizer.save_pretrained(directory)


def stop_ids(kind: str) -> list[int]:
    """Ids of the tokens that end a response."""
    return list(range(1, 1 + len(KINDS[kind]["ends"])))


def make_real_model(directory: Path | str, kind: str, seed: int = 0, *, hidden: int = 64, heads: int = 2) -> Path:
    """Save a random float32 model of a kind and its tokenizer; returns the directory."""
    from transformers import AutoModelForCausalLM

    from tests.tiny_families import config_of, randomised

    directory, traits = Path(directory), KINDS[kind]
    config = config_of(traits["family"], **{
        "vocab_size": PADDED, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": hidden // heads,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": stop_ids(kind)[0], "pad_token_id": 0, **traits["shape"]})
    model = randomised(AutoModelForCausalLM.from_config(config), seed)
    model.save_pretrained(directory, max_shard_size="60KB")
    make_real_tokenizer(directory, kind)
    # As published models have them: sampling's own defaults, here without the do_sample that transformers wants.
    (directory / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": stop_ids(kind), "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9}))
    return directory
