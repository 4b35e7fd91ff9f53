"""Tokenizers and chat templates whose layout differs from ChatML's in one way each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EACH = "{% for m in messages %}"
ASK = "{% if add_generation_prompt %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = EACH + TURN + "{% endfor %}" + ASK + "<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "chatml": CHATML,
    "base": CHATML,
    "two_ends": EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
                + ASK + "<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
    "opened": EACH + TURN + "{% endfor %}" + ASK + "<|im_start|>assistant\n<think>\n{% endif %}",
    "wrapped": EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
               "{{ m.content }}<|im_end|>\n{% endfor %}" + ASK + "<|im_start|>assistant\n<think>\n{% endif %}",
    "channels": EACH + "<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
                "<|message|>{{ m.content }}<|im_end|>{% endfor %}" + ASK + "<|im_start|>assistant{% endif %}",
    "default_system": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
                      + CHATML,
    "blank_first": "<s>" + EACH + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
                   "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
}
"""What is particular: nothing; the tokenizer's end is not the template's; two ends follow an answer; a prompt opens the
answer and the answer does not; the template wraps each answer; it writes special tokens before each answer; it writes a
system message; the tokenizer puts a blank before a text."""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|channel|>",
            "<|message|>", "<think>", "</think>"]
TEXTS = ["The film was good and the food was bad.", "What is 12 + 30? The answer is 42.", "system user assistant"] * 20
SPECIAL_THINK = "special_think"
"""As chatml, and <think> and </think> are special tokens."""
LAYOUTS = [*TEMPLATES, SPECIAL_THINK]


def make_layout(directory: Path, name: str) -> Path:
    """Save the tokenizer of a layout, and the generation_config.json of those that have one."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _sentencepiece() if name == "blank_first" else _byte_level(name)
    tokenizer.chat_template = TEMPLATES.get(name, CHATML)
    tokenizer.save_pretrained(directory)
    if name == "two_ends":
        ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|endoftext|>")]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


def _byte_level(name: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = SPECIALS if name == SPECIAL_THINK else SPECIALS[:-2]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    end = "<|endoftext|>" if name in ("base", "two_ends") else "<|im_end|>"
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<|endoftext|>",
                                   additional_special_tokens=[token for token in specials if token != end])


def _sentencepiece() -> Any:
    """Llama 2's layout: a blank before each text between special tokens, which decoding removes again."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>"]
    words = ["▁The", "▁film", "▁was", "▁good", "▁bad", "▁Was", "▁it"]
    vocabulary = [*specials, *(f"<0x{i:02X}>" for i in range(256)), "▁", *sorted(set("".join(words)) - {"▁"})]
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, unk_token="<unk>",
                                fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([  # type: ignore[assignment]
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens(specials)
    core.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
