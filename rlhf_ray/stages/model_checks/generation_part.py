"""The part of a model's check that runs vLLM: generation, and a publication of other weights.

The reference is transformers' forward pass of each row alone, with its "eager" attention.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError, RLHFError
from rlhf_ray.models.config_json import context_of, is_classifier, pretrained_config
from rlhf_ray.models.generator_parity import TransformersReference, logprob_gap
from rlhf_ray.models.model_families import Use
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.local_generator import local_generation_config
from rlhf_ray.stages.model_checks.outcome import Outcome, refusal
from rlhf_ray.stages.model_checks.pass_parts import SEED
from rlhf_ray.weights.publication import SealedBuckets

RESPONSE = 24
"""Maximum tokens of a response."""
PROMPTS = (3, 8, 13, 21)
"""Tokens of the prompts; one more is as long as `--tokens` allows."""
CACHE_ON_GPU_MB = 1024
CHANGE = 0.1
MOST_CHANGES = 8
"""Relative change of each matrix of the published weights, made until log-probabilities move by ten times what is
tolerated, and at most this often."""
BUCKET_BYTES = 64 << 20
GENERATION = "generation"
PUBLICATION = "new weights for vLLM"


def check_generation(model: ModelConfig, tokens: int) -> list[Outcome]:
    """vLLM's log-probabilities of what it samples, before and after a publication of other weights.

    Args:
        tokens: longest prompt and response together.

    Raises:
        ModelError: vLLM cannot run the model, or samples from another distribution with the initial weights.
    """
    shape = pretrained_config(model)
    if is_classifier(shape.architectures):
        return [Outcome(name, "does not apply", "a classifier generates nothing") for name in (GENERATION, PUBLICATION)]
    if refused := refusal(GENERATION, model, Use.GENERATION):
        return [refused, Outcome(PUBLICATION, "refused", refused.detail, refused.advice)]
    limit = context_of(shape) or tokens
    context = max(min(tokens, limit), min(limit, PROMPTS[-1] + RESPONSE))
    generation = local_generation_config(shape, model, context, len(PROMPTS) + 1)
    if generation.gpus:
        generation = generation.model_copy(update={"kv_cache_mb": CACHE_ON_GPU_MB})
    return asyncio.run(_GenerationCheck(model, generation, context).run())


@dataclass(frozen=True)
class _Comparison:
    """Log-probabilities of a rollout against transformers'."""

    expected: NDArray[np.float32]
    """[n] transformers' log-probabilities of the responses' tokens."""
    gap: float
    """Root mean square of the differences, in nats."""
    tolerated: float
    """How large rounding explains."""


class _GenerationCheck:
    """One generator and transformers' model."""

    def __init__(self, model: ModelConfig, generation: GenerationConfig, context: int) -> None:
        self._model = model
        self._context = context
        self._generator = Generator(model, generation, SEED, context, "check-model")
        self._reference: TransformersReference
        self._random = torch.Generator().manual_seed(SEED)

    async def run(self) -> list[Outcome]:
        """The outcomes of both names."""
        await self._generator.start()
        try:
            self._reference = TransformersReference(self._model, "cuda" if torch.cuda.is_available() else "cpu")
            first = await self._sample(version=0)
            compared = self._compare(first)
            if compared.gap > compared.tolerated:
                raise ModelError(f"log-probabilities of sampled tokens differ by {compared.gap:.3g} nats from "
                                 f"transformers', and rounding explains {compared.tolerated:.3g}")
            outcome = Outcome(GENERATION, "works", f"log-probabilities of {len(compared.expected)} sampled tokens "
                              f"differ by {compared.gap:.2g} nats", "", {"difference": compared.gap})
            return [outcome, await self._publication(first, compared)]
        finally:
            await self._generator.stop()

    async def _publication(self, first: Rollout, compared: _Comparison) -> Outcome:
        """Publish other weights and sample again.

        Args:
            compared: the comparison of `first` with the present weights.
        """
        if refused := refusal(PUBLICATION, self._model, Use.PUBLICATION):
            return refused
        enough = 10 * compared.tolerated
        moved = 0.0
        for _ in range(MOST_CHANGES):
            self._change_weights()
            if (moved := logprob_gap(compared.expected, self._reference.logprobs(first))) >= enough:
                break
        else:
            return Outcome(PUBLICATION, "not checked", f"random changes of the weights move log-probabilities by "
                           f"{moved:.3g} nats only; a missing update is detected from {enough:.3g} nats on",
                           "use --dtype float32")
        try:
            await self._publish()
            changed = self._compare(await self._sample(version=1))
        except RLHFError as error:
            return Outcome(PUBLICATION, "fails", str(error), "do not train this model with PPO")
        if changed.gap > changed.tolerated:
            return Outcome(PUBLICATION, "fails", f"after a change of the weights, which moves log-probabilities by "
                           f"{moved:.3g} nats, those of sampled tokens differ by {changed.gap:.3g} from "
                           f"transformers', and rounding explains {changed.tolerated:.3g}",
                           "do not train this model with PPO")
        return Outcome(PUBLICATION, "works", f"after a change by {moved:.2g} nats they differ by {changed.gap:.2g}", "",
                       {"difference": changed.gap, "change": moved})

    async def _sample(self, version: int) -> Rollout:
        """Responses to random prompts. Raises ModelError if they come from another version of the weights."""
        longest = max(self._context - RESPONSE, 1)
        lengths = [min(length, longest) for length in (*PROMPTS, longest)]
        vocabulary = self._reference.model.config.get_text_config().vocab_size
        rows = np.random.default_rng(SEED + version).integers(0, vocabulary, sum(lengths)).astype(np.int32)
        prompts = Prompts(offsets_of(lengths), rows, [""] * len(lengths), [{} for _ in lengths],
                          np.arange(len(lengths)))
        keys = [SampleKey(0, row, 0) for row in range(len(lengths))]
        rollout = await self._generator.generate(prompts, keys, SEED, SamplingConfig(max_tokens=RESPONSE))
        if set(rollout.versions[rollout.response_mask].tolist()) != {version}:
            raise ModelError(f"tokens were not sampled with version {version} of the weights")
        return rollout

    async def _publish(self) -> None:
        """Send the reference's weights to the generator, as a learner sends its own."""
        named = dict(self._reference.model.named_parameters())
        specs = [(name, tuple(p.shape), self._model.dtype) for name, p in named.items()]
        sealed = SealedBuckets(specs, set(named), BUCKET_BYTES, lambda names: {n: named[n].cpu() for n in names})
        buckets = sealed.plan.whole.buckets
        await self._generator.begin_weights(1, 1, buckets)
        for index in range(buckets):
            bucket = sealed.bucket(1, index)
            assert bucket is not None  # the gather above returns tensors
            await self._generator.load_weights(bucket, 1)
        await self._generator.finish_weights(1)

    @torch.no_grad()
    def _change_weights(self) -> None:
        for parameter in self._reference.model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=self._random).to(parameter)
                parameter.add_(CHANGE * parameter.std() * noise)

    def _compare(self, rollout: Rollout) -> _Comparison:
        """A rollout's log-probabilities against those of the reference's present weights."""
        expected = self._reference.logprobs(rollout)
        gap = logprob_gap(rollout.logprobs[rollout.response_mask], expected)
        return _Comparison(expected, gap, self._reference.tolerated(rollout, expected))
