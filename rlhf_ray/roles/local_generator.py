"""One model that answers prompts in this process: what `rlhf-ray generate` and `rlhf-ray compare` talk to.

It is a generator with the settings that a machine by itself suggests. Prompts come as texts or chat messages, answers
go as texts with their tokens, ready to be judged by any source of rewards.
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
from rlhf_ray.models.loading import load_tokenizer, pretrained_config
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.rewards.requests import requests_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.prompt_input import Question, encode_questions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MIB = 2**20
CACHE_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPUs."""
SMALLEST_CACHE_MB = 64
AT_A_TIME = 16
"""Questions whose answers appear together."""


class Responder:
    """Answers questions with one model, in an order and with seeds that do not depend on what it answered before."""

    def __init__(self, model: ModelConfig, sampling: SamplingConfig, seed: int, chat: bool, sequences: int) -> None:
        """
        Args:
            seed: every answer's own seed follows from it and the answer's key.
            chat: put texts into the tokenizer's chat template, as a user's turn, where it has one.
            sequences: most answers that are drawn at the same time.
        """
        self.model, self._sampling, self._seed, self._chat = model, sampling, seed, chat
        self._sequences = sequences

    async def start(self, questions: Sequence[Question] = (), room: int = 0) -> None:
        """Load tokenizer and model.

        Args:
            questions: to be asked; the context is made long enough for them.
            room: tokens of prompt to make room for besides, as far as the model's context reaches.

        Raises:
            ModelError: the model is missing or cannot be run.
            DataError: a question is too long for the model.
        """
        self._tokenizer = load_tokenizer(self.model)
        config = pretrained_config(self.model)
        longest = max((len(row) for row in self._encode(questions)[1]), default=0)
        self.context = _context(config, longest, room, self._sampling.max_tokens, self.model.path)
        self._generator = Generator(self.model, local_generation(config, self.model, self.context, self._sequences),
                                    self._seed, self.context, Path(self.model.path).name)
        await self._generator.start()

    async def answer(
        self, questions: Sequence[Question], samples: int = 1, epoch: int = 0
    ) -> AsyncIterator[list[RewardRequest]]:
        """Answers in the order of the questions, those of one question together, some questions at a time as they are
        done. All are drawn side by side. Asking the same again in another `epoch` draws other answers.

        Raises:
            DataError: a question leaves no room for an answer.
        """
        prompts = self._prompts(questions)
        rows = [range(i, min(i + AT_A_TIME, len(questions))) for i in range(0, len(questions), AT_A_TIME)]
        parts = [asyncio.create_task(self._draw(prompts, [SampleKey(epoch, row, sample) for row in some
                                                          for sample in range(samples)])) for some in rows]
        try:
            for part in parts:
                rollout = await part
                yield requests_of(rollout, prompts, self._tokenizer)
        finally:
            for part in parts:
                part.cancel()

    async def stop(self) -> None:
        """Let go of model and memory."""
        await self._generator.stop()

    async def _draw(self, prompts: Prompts, keys: list[SampleKey]) -> Rollout:
        return await self._generator.generate(prompts, keys, self._seed, self._sampling)

    def _encode(self, questions: Sequence[Question]) -> tuple[list[str], list[list[int]], list[Messages | None] | None]:
        return encode_questions(questions, self._tokenizer, self._chat)

    def _prompts(self, questions: Sequence[Question]) -> Prompts:
        texts, rows, messages = self._encode(questions)
        for question, row in zip(questions, rows, strict=True):
            if not 0 < len(row) < self.context:
                raise DataError(f"{question.place}: the prompt has {len(row)} tokens, and prompts of 1 to "
                                f"{self.context - 1} can be answered here")
        return Prompts(
            offsets=offsets_of([len(row) for row in rows]), tokens=flat_tokens(rows), texts=texts,
            metadata=[dict(question.metadata) for question in questions], rows=np.arange(len(rows)), messages=messages,
        )


def _context(config: PretrainedConfig, prompt: int, room: int, response: int, model: str) -> int:
    """Tokens of prompt (the longest one, or `room`) and response to make room for, as far as the model's context goes.

    Raises:
        DataError: the model's context does not even hold the prompt and one token.
    """
    wanted = max(prompt, room) + response
    limit = getattr(config, "max_position_embeddings", None) or wanted
    if prompt >= limit:
        raise DataError(f"a prompt has {prompt} tokens, and the context of {model} is {limit}; shorten it")
    return min(wanted, limit)


def local_generation(config: PretrainedConfig, model: ModelConfig, context: int, sequences: int) -> GenerationConfig:
    """vLLM's settings for one model alone on this machine: a GPU if there is one, else all cores that may be used."""
    import torch

    if torch.cuda.is_available():
        return GenerationConfig(gpus=1, engine="in_process", max_sequences=sequences)
    return GenerationConfig(threads=len(os.sched_getaffinity(0)), max_sequences=sequences,
                            kv_cache_mb=_cache_mb(config, model, context, sequences))


def _cache_mb(config: Any, model: ModelConfig, context: int, sequences: int) -> int:
    """MiB of keys and values (two of them a layer and head) of `sequences` contexts, in whole cache blocks."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * (2 if model.dtype == "bfloat16" else 4)
    blocks = math.ceil(context / CACHE_BLOCK) + 1
    return max(SMALLEST_CACHE_MB, math.ceil(token * blocks * CACHE_BLOCK * sequences / MIB))
