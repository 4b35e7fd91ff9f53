"""The part of a model's check that runs vLLM: generation, and a publication of other weights.

The reference is transformers' forward pass of each row alone, with its "eager" attention.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError, RLHFError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.model_families import Use
from rlhf_ray.records import Prompts, Rollout, SampleKey, offsets_of
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.local_generator import local_generation_config
from rlhf_ray.stages.model_checks.outcome import Outcome, refusal
from rlhf_ray.stages.model_checks.pass_parts import SEED, is_classifier, root_mean_square
from rlhf_ray.weights.publisher import Publisher

RESPONSE = 24
"""Maximum tokens of a response."""
PROMPTS = (3, 8, 13, 21)
"""Tokens of the prompts; one more is as long as `--tokens` allows."""
CACHE_ON_GPU_MB = 1024
FIXED = {"float32": 1e-4, "bfloat16": 0.05}
"""Tolerated difference of log-probabilities in nats, root mean square over the tokens, by precision."""
NOISE = 2.5
"""Differences up to this multiple of those that one rounding of the embeddings makes are rounding, too (see
`models.parity`)."""
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
    if is_classifier(shape):
        return [Outcome(name, "does not apply", "a classifier generates nothing") for name in (GENERATION, PUBLICATION)]
    if refused := refusal(GENERATION, model, Use.GENERATION):
        return [refused, Outcome(PUBLICATION, "refused", refused.detail, refused.advice)]
    limit = getattr(shape.get_text_config(), "max_position_embeddings", None) or tokens
    context = max(min(tokens, limit), min(limit, PROMPTS[-1] + RESPONSE))
    generation = local_generation_config(shape, model, context, len(PROMPTS) + 1)
    if generation.gpus:
        generation = generation.model_copy(update={"kv_cache_mb": CACHE_ON_GPU_MB})
    return asyncio.run(_GenerationCheck(model, generation, context).run())


@dataclass(frozen=True)
class _Gap:
    """A difference of log-probabilities, and how large rounding explains."""

    value: float
    tolerated: float


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
            gap = self._gap(first)
            if gap.value > gap.tolerated:
                raise ModelError(f"log-probabilities of sampled tokens differ by {gap.value:.3g} nats from "
                                 f"transformers', and rounding explains {gap.tolerated:.3g}")
            outcome = Outcome(GENERATION, "works", f"log-probabilities of {_sampled(first)} sampled tokens differ by "
                              f"{gap.value:.2g} nats", "", {"difference": gap.value})
            return [outcome, await self._publication(first)]
        finally:
            await self._generator.stop()

    async def _publication(self, first: Rollout) -> Outcome:
        """Publish other weights and sample again."""
        if refused := refusal(PUBLICATION, self._model, Use.PUBLICATION):
            return refused
        before, enough, moved = self._logprobs(first), 10 * self._gap(first).tolerated, 0.0
        for _ in range(MOST_CHANGES):
            self._change_weights()
            if (moved := root_mean_square(before - self._logprobs(first))) >= enough:
                break
        else:
            return Outcome(PUBLICATION, "not checked", f"random changes of the weights move log-probabilities by "
                           f"{moved:.3g} nats only; a missing update is detected from {enough:.3g} nats on",
                           "use --dtype float32")
        try:
            await self._publish()
            gap = self._gap(await self._sample(version=1))
        except RLHFError as error:
            return Outcome(PUBLICATION, "fails", str(error), "do not train this model with PPO")
        if gap.value > gap.tolerated:
            return Outcome(PUBLICATION, "fails", f"after a change of the weights, which moves log-probabilities by "
                           f"{moved:.3g} nats, those of sampled tokens differ by {gap.value:.3g} from transformers', "
                           f"and rounding explains {gap.tolerated:.3g}", "do not train this model with PPO")
        return Outcome(PUBLICATION, "works", f"after a change by {moved:.2g} nats they differ by {gap.value:.2g}", "",
                       {"difference": gap.value, "change": moved})

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

    def _gap(self, rollout: Rollout) -> _Gap:
        """The difference of a rollout's log-probabilities from transformers', in nats."""
        expected = self._logprobs(rollout)
        with _rounded_embeddings(self._reference):
            noise = root_mean_square(self._logprobs(rollout) - expected)
        value = root_mean_square(torch.from_numpy(rollout.logprobs[rollout.response_mask]) - expected)
        return _Gap(value, FIXED[self._model.dtype] + NOISE * noise)

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


@contextmanager
def _rounded_embeddings(model: nn.Module) -> Iterator[None]:
    """Inside, the embeddings' output is off by up to one rounding."""
    def perturb(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = (2 * torch.rand(output.shape, generator=generator) - 1).to(output.device)
        return (output.float() * (1 + torch.finfo(output.dtype).eps / 2 * noise)).to(output.dtype)

    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_hook(perturb)
    try:
        yield
    finally:
        hook.remove()


def _sampled(rollout: Rollout) -> int:
    return int(rollout.response_mask.sum())

