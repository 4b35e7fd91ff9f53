"""One model that generates responses in this process, for `rlhf-ray generate` and `rlhf-ray compare`.

It wraps a `Generator` with settings derived from this machine. Prompts are texts or chat messages; responses are texts
with their tokens, in the form that every reward source takes.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.chat import Messages
from rlhf_ray.data.encoding import flat_tokens
from rlhf_ray.errors import DataError
from rlhf_ray.models.config_json import context_of, pretrained_config
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.rewards.protocol import RewardRequest, requests_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.prompt_input import PromptInput, encode_prompt_inputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MIB = 2**20
CACHE_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPUs."""
SMALLEST_CACHE_MB = 64
PROMPTS_PER_CALL = 16
"""Prompts whose responses are returned together."""


class LocalGenerator:
    """Generates with one model, in an order and with seeds that do not depend on earlier prompts."""

    def __init__(self, model: ModelConfig, sampling: SamplingConfig, seed: int, chat: bool, sequences: int) -> None:
        """
        Args:
            seed: each response's seed is derived from it and the response's key.
            chat: put texts into the tokenizer's chat template, as a user turn, if it has one.
            sequences: maximum number of responses generated at the same time.
        """
        self.model, self._sampling, self._seed, self._chat = model, sampling, seed, chat
        self._sequences = sequences

    async def start(self, prompts: Sequence[PromptInput] = (), prompt_tokens: int = 0) -> None:
        """Load tokenizer and model.

        Args:
            prompts: prompts to come; the context is made long enough for them.
            prompt_tokens: at least this many prompt tokens fit, as far as the model's context allows.

        Raises:
            ModelError: the model is missing, cannot be run, or vLLM computes another model than transformers.
            DataError: a prompt is too long for the model.
        """
        self._tokenizer = load_tokenizer(self.model)
        config = pretrained_config(self.model)
        longest = max((len(row) for row in self._encode(prompts)[1]), default=0)
        self.context = _context(config, longest, prompt_tokens, self._sampling.max_tokens, self.model.path)
        generation = local_generation_config(config, self.model, self.context, self._sequences)
        self.generator = Generator(self.model, generation, self._seed, self.context, Path(self.model.path).name)
        await self.generator.start()
        await self.generator.compare_with_transformers()

    async def generate(
        self, prompts: Sequence[PromptInput], samples: int = 1, epoch: int = 0
    ) -> AsyncIterator[list[RewardRequest]]:
        """Responses in the order of the prompts, those of one prompt together; yields `PROMPTS_PER_CALL` prompts at a
        time. All are generated concurrently. The same prompts in another `epoch` get other responses.

        Raises:
            DataError: a prompt leaves no room for a response.
        """
        encoded = self.prompts_of(prompts)
        starts = range(0, len(prompts), PROMPTS_PER_CALL)
        keys = [[SampleKey(epoch, row, sample) for row in range(start, min(start + PROMPTS_PER_CALL, len(prompts)))
                 for sample in range(samples)] for start in starts]
        tasks = [asyncio.create_task(self._generate(encoded, some)) for some in keys]
        try:
            for task in tasks:
                yield requests_of(await task, encoded, self._tokenizer)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Release the model and its memory."""
        await self.generator.stop()

    async def _generate(self, prompts: Prompts, keys: list[SampleKey]) -> Rollout:
        return await self.generator.generate(prompts, keys, self._seed, self._sampling)

    def _encode(
        self, prompts: Sequence[PromptInput]
    ) -> tuple[list[str], list[list[int]], list[Messages | None] | None]:
        return encode_prompt_inputs(prompts, self._tokenizer, self._chat)

    def prompts_of(self, prompts: Sequence[PromptInput]) -> Prompts:
        """The prompts as a record, with row numbers from 0.

        Raises:
            DataError: a prompt leaves no room for a response.
        """
        texts, rows, messages = self._encode(prompts)
        for prompt, row in zip(prompts, rows, strict=True):
            if not 0 < len(row) < self.context:
                raise DataError(f"{prompt.location}: the prompt has {len(row)} tokens, and prompts of 1 to "
                                f"{self.context - 1} fit the context here; shorten it")
        return Prompts(
            offsets=offsets_of([len(row) for row in rows]), tokens=flat_tokens(rows), texts=texts,
            metadata=[dict(prompt.metadata) for prompt in prompts], rows=np.arange(len(rows)), messages=messages,
        )


def _context(config: PretrainedConfig, prompt: int, at_least: int, response: int, model: str) -> int:
    """Context in tokens for the longest prompt (or `at_least` tokens of prompt) and a response, up to the model's own.

    Raises:
        DataError: the model's context does not hold the prompt and one token.
    """
    wanted = max(prompt, at_least) + response
    limit = context_of(config) or wanted
    if prompt >= limit:
        raise DataError(f"a prompt has {prompt} tokens, and the context of {model} is {limit}; shorten the prompt")
    return min(wanted, limit)


def local_generation_config(
    config: PretrainedConfig, model: ModelConfig, context: int, sequences: int
) -> GenerationConfig:
    """vLLM's settings for one model on this machine: a GPU if there is one, else all cores of this process."""
    import torch

    if torch.cuda.is_available():
        return GenerationConfig(gpus=1, engine="in_process", max_sequences=sequences)
    return GenerationConfig(threads=len(os.sched_getaffinity(0)), max_sequences=sequences,
                            kv_cache_mb=_cache_mb(config, model, context, sequences))


def _cache_mb(config: Any, model: ModelConfig, context: int, sequences: int) -> int:
    """MiB of keys and values (both, per layer and head) for `sequences` contexts, in whole cache blocks."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * (2 if model.dtype == "bfloat16" else 4)
    blocks = math.ceil(context / CACHE_BLOCK) + 1
    return max(SMALLEST_CACHE_MB, math.ceil(token * blocks * CACHE_BLOCK * sequences / MIB))
