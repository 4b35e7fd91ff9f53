"""The part of a model's check that runs vLLM: generation, and a publication of other weights.

The reference is transformers' forward pass of each row alone, with its "eager" attention.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError, RLHFError
from rlhf_ray.models.config_json import context_of, is_classifier, pretrained_config
from rlhf_ray.models.model_families import Use
from rlhf_ray.models.parity import NOISE, root_mean_square
from rlhf_ray.models.parity_pass import embedding_as_leaf
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.local_generator import local_generation_config
from rlhf_ray.stages.model_checks.outcome import Outcome, refusal
from rlhf_ray.stages.model_checks.pass_parts import SEED
from rlhf_ray.weights.publisher import Publisher

RESPONSE = 24
"""Maximum tokens of a response."""
PROMPTS = (3, 8, 13, 21)
"""Tokens of the prompts; one more is as long as `--tokens` allows."""
CACHE_ON_GPU_MB = 1024
FIXED = {"float32": 1e-4, "bfloat16": 0.05}
"""Tolerated difference of log-probabilities in nats, root mean square over the tokens, by precision."""
CHANGE, MOST_CHANGES = 0.1, 8
"""Relative change of each matrix of the published weights, made until log-probabilities move by ten times what is
tolerated, and at most this often."""
BUCKET_BYTES = 64 << 20
GENERATION, PUBLICATION = "generation", "new weights for vLLM"


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

    expected: Tensor
    """[n] transformers' log-probabilities of the responses' tokens."""
    gap: float
    """Root mean square of the differences, in nats."""
    tolerated: float
    """How large rounding explains."""


class _GenerationCheck:
    """One generator and transformers' model."""

    def __init__(self, model: ModelConfig, generation: GenerationConfig, context: int) -> None:
        self._model, self._context = model, context
        self._generator = Generator(model, generation, SEED, context, "check-model")
        self._reference: Any = None
        self._random = torch.Generator().manual_seed(SEED)

    async def run(self) -> list[Outcome]:
        """The outcomes of both names."""
        await self._generator.start()
        try:
            self._reference = _reference(self._model)
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
        enough, moved = 10 * compared.tolerated, 0.0
        for _ in range(MOST_CHANGES):
            self._change_weights()
            if (moved := root_mean_square(compared.expected - self._logprobs(first))) >= enough:
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
        vocabulary = self._reference.config.get_text_config().vocab_size
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
        named = dict(self._reference.named_parameters())
        specs = [(name, tuple(p.shape), self._model.dtype) for name, p in named.items()]
        publisher = Publisher(specs, set(named), BUCKET_BYTES, lambda names: {n: named[n].cpu() for n in names})
        buckets = publisher.plan.whole.buckets
        await self._generator.begin_weights(1, 1, buckets)
        for index in range(buckets):
            bucket = publisher.bucket(1, index)
            assert bucket is not None  # the gather above returns tensors
            await self._generator.load_weights(bucket, 1)
        await self._generator.finish_weights(1)

    @torch.no_grad()
    def _change_weights(self) -> None:
        for parameter in self._reference.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=self._random).to(parameter)
                parameter.add_(CHANGE * parameter.std() * noise)

    def _compare(self, rollout: Rollout) -> _Comparison:
        """A rollout's log-probabilities against those of the reference's present weights."""
        expected = self._logprobs(rollout)
        with embedding_as_leaf(self._reference, rounding=torch.finfo(getattr(torch, self._model.dtype)).eps / 2):
            noise = root_mean_square(self._logprobs(rollout) - expected)
        gap = root_mean_square(torch.from_numpy(rollout.logprobs[rollout.response_mask]) - expected)
        return _Comparison(expected, gap, FIXED[self._model.dtype] + NOISE * noise)

    @torch.no_grad()
    def _logprobs(self, rollout: Rollout) -> Tensor:
        """[n] float32 log-probabilities of the responses' tokens, each row in a pass of its own."""
        device, parts = next(self._reference.parameters()).device, []
        for row in range(len(rollout)):
            tokens = torch.from_numpy(rollout.row(row, "tokens").astype(np.int64)).to(device)
            logits = self._reference(tokens[None], use_cache=False).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].cpu()
            parts.append(chosen[torch.from_numpy(rollout.row(row, "response_mask")[1:])])
        return torch.cat(parts)


def _reference(model: ModelConfig) -> Any:
    """transformers' own model, on this machine's GPU if there is one."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=getattr(torch, model.dtype), attn_implementation="eager", use_safetensors=True, **model.trust)
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
