"""Tiny Llama models with a word-level tokenizer, made on the spot for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EOS = "</s>"
PAD = "<pad>"


def make_tiny_tokenizer(directory: Path, vocab: int) -> None:
    """Save a tokenizer of `vocab` words: "<pad>" (0), "</s>" (1) and "w2", "w3", ...; words are split at spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {PAD: 0, EOS: 1} | {f"w{i}": i for i in range(2, vocab)}
    core = Tokenizer(WordLevel(words, unk_token=PAD))
    core.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD).save_pretrained(directory)


def make_tiny_llama(
    directory: Path | str, vocab: int = 128, tied: bool = True, seed: int = 0, *, hidden: int = 64, layers: int = 2,
    heads: int = 2, positions: int = 256, scale: float = 0.2,
) -> Path:
    """Save a random float32 Llama and its tokenizer in Hugging Face format; returns the directory.

    Args:
        heads: hidden / heads must be one of the head sizes of vLLM's CPU attention: a multiple of 32, say.
        scale: standard deviation of the weights. 0.2 gives clearly uneven distributions, so that a comparison of
            log-probabilities notices wrong weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = Path(directory)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=positions,
        tie_word_embeddings=tied, initializer_range=scale, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    make_tiny_tokenizer(directory, vocab)
    return directory


def make_tiny_reward_model(directory: Path | str, vocab: int = 128, seed: int = 1, *, hidden: int = 32,
                           positions: int = 256) -> Path:
    """Save a random float32 one-label reward model and its tokenizer; returns the directory."""
    import torch

    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _tiny_classifier(vocab, hidden, positions)
    model.save_pretrained(directory)
    make_tiny_tokenizer(directory, vocab)
    return directory


def make_counting_reward_model(
    directory: Path | str, vocab: int = 128, *, hidden: int = 32, positions: int = 256
) -> Path:
    """Save a reward model whose score is a rising function of the share of tokens below vocab / 2 in prompt and
    response, from about -1 (none) to 1 (all); returns the directory.

    Attention is uniform (queries and keys are zero) and hands the mean of the row's embeddings on; the feed-forward
    layers do nothing; the head reads the difference of the two directions that tokens of either half point in.
    """
    import torch

    directory = Path(directory)
    model = _tiny_classifier(vocab, hidden, positions)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        embedding, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        embedding[: vocab // 2, 0] = embedding[vocab // 2 :, 1] = 1.0
        attention.v_proj.weight.copy_(torch.eye(hidden))
        attention.o_proj.weight.copy_(100 * torch.eye(hidden))
        model.score.weight[0, :2] = torch.tensor([1.0, -1.0]) / hidden**0.5
    model.save_pretrained(directory)
    make_tiny_tokenizer(directory, vocab)
    return directory


def _tiny_classifier(vocab: int, hidden: int, positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=positions, num_labels=1, initializer_range=0.2,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ))
