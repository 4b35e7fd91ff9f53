"""The generator: samples responses with vLLM, and applies new policy weights between two tokens.

It owns a vLLM engine and the receiver of its weights. The coordinator decides which prompts to sample and when to
publish weights; `weights.receiver` defines what a valid publication is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.derived import Derived
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.answers import stop_tokens
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.data.tokenizer import check_vocabulary
from rlhf_ray.errors import DataError, ModelError, WeightsError, WorkerError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import load_tokenizer, parameter_shapes
from rlhf_ray.models.lora import adapter_shapes
from rlhf_ray.models.model_families import sends_adapters
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.records import (
    GivenTokens,
    Prompts,
    Rollout,
    SampleKey,
    WeightBucket,
    WeightOffer,
    WeightRoute,
    WeightsConfirmed,
    WorkerProfile,
)
from rlhf_ray.roles.engines.async_llm import AsynchronousEngine
from rlhf_ray.roles.engines.interface import AdapterSettings, Completion, EngineSettings, SampleRequest, SamplingEngine
from rlhf_ray.roles.engines.partial_rollouts import AbortableEngine, PartialRolloutEngine
from rlhf_ray.roles.engines.vllm_adapter import generator_environment
from rlhf_ray.roles.rollout_rows import as_rollout, sample_request
from rlhf_ray.weights.manifest import fused_groups
from rlhf_ray.weights.receiver import Receiver

__all__ = ["Generator", "generator_environment"]

LARGEST_COMPARED = 2 << 30
"""Bytes of the weights of the largest model that commands without a learner load once more, to compare it."""
SHOWN_CALLS = 5
"""Calls that a message about open requests names."""
SHOWN_SEEDS = 3
"""Seeds of each, by which samples/ has the samples."""


class GeneratorActivity(NamedTuple):
    """What a generator has to do, whoever asked for it, and whether it makes progress."""

    requests: int
    """Open requests."""
    oldest_s: float
    """Seconds since the oldest open request arrived; 0 without one."""
    tokens: int
    """See `Generator.tokens_made`."""


class OpenCall(NamedTuple):
    """A call of the engine under way."""

    began: float
    """By the monotonic clock."""
    requests: Sequence[SampleRequest]

    def described(self, now: float) -> str:
        """In words: "2 requests for 3.1 s (seed 12, 34)"."""
        many = len(self.requests)
        seeds = [str(request.seed) for request in self.requests[:SHOWN_SEEDS]] + ["..."] * (many > SHOWN_SEEDS)
        return f"{many} request{'s' * (many > 1)} for {now - self.began:.1f} s (seed {', '.join(seeds)})"


class Generator:
    """One vLLM engine and its weights.

    Example:
        generator = Generator(ModelConfig(path="models/policy"), GenerationConfig(), seed=0, max_context=512)
        await generator.start()
        request = SampleRequest([5, 6, 7], SamplingConfig(), max_tokens=16, seed=3, stop_tokens=[2])
        [completion] = await generator.sample([request])
        await generator.stop()

    Args:
        model: initial weights, which are version 0.
        seed: seed of the engine. Samples do not depend on it: each has its own seed, from the run's seed and its key.
        max_context: longest prompt and response together, in tokens.
        in_flight: what happens to responses in flight when new weights arrive, see `WeightsConfig`.
        transport: how new weights are sent, see `WeightsConfig`.
        record_masks: record the sampling mask of each token, if the configured sampling excludes tokens, for learners.
        lora: publications contain adapters of this kind alone, which are added to `model`; None: they contain weights.
    """

    def __init__(
        self, model: ModelConfig, generation: GenerationConfig, seed: int, max_context: int, name: str = "generator/0",
        in_flight: Literal["keep", "abort"] = "keep", transport: str = "object_store",
        record_masks: bool = False, lora: LoRAConfig | None = None,
    ) -> None:
        self._model = model
        self._lora = lora
        self._generation = generation
        self._record_masks = record_masks
        self._seed = seed
        self._max_context = max_context
        self.name = name
        self._in_flight = in_flight
        self._transport = transport
        self._engine: SamplingEngine | None = None
        self._receiver: Receiver[Any] | None = None
        self._publishing = asyncio.Lock()
        self._publication = 0
        self._stop_tokens: list[int] = []
        self._vocabulary = 0
        self._bytes = 0
        self._groups: list[list[str]] = []
        self._open_calls: dict[object, OpenCall] = {}
        """Calls of the engine under way."""
        self._idle = asyncio.Event()
        """No call of the engine is under way."""

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run."""
        return {
            "model": config.model,
            "generation": config.generator,
            "seed": config.run.seed,
            "max_context": derived.longest_sample,
            "name": f"generator/{rank}",
            "in_flight": config.weights.in_flight,
            "transport": config.weights.transport,
            "record_masks": True,
            "lora": config.policy.lora if sends_adapters(config) else None,
        }

    async def start(self) -> None:
        """Load tokenizer and model.

        Raises:
            ModelError: model or tokenizer is missing, they do not match, or vLLM cannot run the model.
        """
        os.environ.update(generator_environment(self._generation))
        config = pretrained_config(self._model)
        tokenizer = load_tokenizer(self._model)
        check_vocabulary(tokenizer, config.vocab_size, self._model.path)
        self._vocabulary = config.vocab_size
        self._stop_tokens = stop_tokens(tokenizer, named_stop_tokens(tokenizer, self._model))
        shapes = parameter_shapes(config, self._model.trust_remote_code)
        adapters = None
        self._bytes = sum(map(prod, shapes.values())) * (2 if self._model.dtype == "bfloat16" else 4)
        if self._lora:
            adapters = AdapterSettings(
                self._lora.rank, adapter_shapes(config, self._lora, self._model.trust_remote_code))
        self._engine = build_engine(EngineSettings(
            self._model, self._generation, self._max_context, self._seed, self.name, config.architectures or [], shapes,
            partial(tokenizer.decode, skip_special_tokens=True), self._transport, adapters,
        ), self._in_flight)
        await self._engine.start()
        await self._generate_one_token(self._engine)
        self._groups = [] if adapters else fused_groups(shapes, await self._engine.fused_layers())
        self._receiver = Receiver(self.name, 0, adapters.shapes if adapters else shapes, self._engine.open_stage)

    async def _generate_one_token(self, engine: SamplingEngine) -> None:
        """Sample one token: a model that vLLM loads but cannot run fails now, and first-time costs are paid now."""
        trial = SampleRequest(self._stop_tokens[:1], SamplingConfig(max_tokens=1), 1, 0, self._stop_tokens)
        try:
            await engine.sample([trial])
        except WorkerError as error:
            raise ModelError(f"vLLM cannot run the model {self._model.path!r}: {error}. Use a model of a supported "
                             "family (docs/models.md)") from error

    async def generate(
        self, prompts: Prompts, keys: list[SampleKey], run_seed: int, sampling: SamplingConfig | None = None
    ) -> Rollout:
        """`sample` one response per key, in the order of `keys`, with a seed from the run's seed and the key.

        Args:
            prompts: the rows of the data set that the keys refer to (each once), matched by `prompts.rows`.
            sampling: overrides the configured sampling, as for evaluation. Sampling masks are recorded only if it is
                the same distribution.

        Raises:
            DataError: a prompt leaves no tokens for a response.
            ModelError, WeightsError, WorkerError: as `sample`.
        """
        self._ready_engine()
        settings = sampling or self._generation.sampling
        places = {row: i for i, row in enumerate(prompts.rows.tolist())}
        requests = [self._request(prompts.row(places[key.row], "tokens").tolist(), key, run_seed, settings)
                    for key in keys]
        completions = await self.sample(requests)
        return as_rollout(keys, requests, completions, self._records_masks(settings))

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample one completion per request, in their order. Calls may overlap, and their requests are batched
        together. A request's completion follows from the request and the weights alone: another generator gives the
        same one. When a cancelled call has ended, the engine does not have its requests any more.

        Raises:
            ModelError: so many tokens are equally likely that the sampling mask is not known.
            WeightsError: a publication of weights failed and no later one has been confirmed.
            DataError: a prompt and its response do not fit the context.
            WorkerError: the engine died.
        """
        engine = self._ready_engine()
        for request in requests:
            self._require_room(request)
        completions = await self._sampled(engine, requests)
        self._require_whole_masks(requests, completions)
        return completions

    async def _sampled(self, engine: SamplingEngine, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`SamplingEngine.sample`, whose requests count as open meanwhile."""
        call = object()
        self._open_calls[call] = OpenCall(time.monotonic(), requests)
        self._idle.clear()
        try:
            return await engine.sample(requests)
        finally:
            del self._open_calls[call]
            if not self._open_calls:
                self._idle.set()

    async def given_logprobs(self, rows: GivenTokens) -> tuple[NDArray[np.float32], int]:
        """Log-probabilities of given tokens under the current weights at temperature 1, `[n]`, and the version of the
        weights. They are computed before requests that wait. Rows are shorter than `max_context`, since vLLM always
        samples one token more.

        Raises:
            WeightsError, WorkerError: as `generate`.
        """
        engine = self._ready_engine()
        one = SamplingConfig(max_tokens=1, temperature=0)
        completions = await self._sampled(engine, [
            SampleRequest(rows.row(i, "tokens").tolist(), one, 1, 0, self._stop_tokens, scores_prompt=True)
            for i in range(len(rows))])
        if any(completion.prompt_logprobs is None for completion in completions):
            raise WorkerError(f"{self.name}: vLLM returned no log-probabilities of given tokens; use the pinned "
                              "version of vLLM")
        values = np.concatenate([cast(Any, completion.prompt_logprobs) for completion in completions])
        versions = np.concatenate([completion.versions for completion in completions])
        return values[rows.response_mask], int(versions.min())

    async def compare_with_transformers(self) -> float | None:
        """Compare log-probabilities of fixed tokens with those of transformers' model, for commands without a learner.
        Returns the gap in nats; None for a model of which a second copy on the CPU would be expensive
        (`LARGEST_COMPARED`).

        Raises:
            ModelError: vLLM computes another model.
        """
        from rlhf_ray.models.generator_parity import TransformersReference, given_rows, logprob_gap

        if self._bytes > LARGEST_COMPARED or self._max_context < 3:
            return None
        rows = given_rows(pretrained_config(self._model), self._max_context - 1)
        values, _ = await self.given_logprobs(rows)

        def compared() -> tuple[float, float]:
            reference = TransformersReference(self._model)
            expected = reference.logprobs(rows)
            return logprob_gap(values, expected), reference.tolerated(rows, expected)

        gap, tolerated = await asyncio.to_thread(compared)
        if gap > tolerated:
            raise ModelError(
                f"vLLM computes another model from {self._model.path!r} than transformers: log-probabilities of the "
                f"same tokens differ by {gap:.3g} nats, and rounding explains {tolerated:.3g}. Usually an entry of "
                "config.json is read by only one of the two: compare config.json with that of the original model")
        return gap

    def fused_groups(self) -> list[list[str]]:
        """Names of weights that share a fused layer: a publication contains all of a group or none."""
        return self._groups

    async def begin_weights(
        self, publication: int, version: int, count: int, resend: bool = False,
        unchanged: Mapping[str, str] | None = None,
    ) -> None:
        """Expect a publication; see `Receiver.begin`. Generation continues with the old weights meanwhile.

        Args:
            publication: number of the publication, which its buckets repeat.
        """
        _, receiver = self._running()
        async with self._publishing:
            self._publication = publication
            await asyncio.to_thread(receiver.begin, version, count, resend, unchanged)

    async def load_weights(self, bucket: WeightBucket | WeightOffer, publication: int) -> None:
        """Verify and keep one bucket, see `Receiver.load`; or receive it from GPU to GPU, see `Receiver.expect`.

        Raises:
            WeightsError: as these; also for a bucket of an earlier publication, which does not affect the latest one.
                A call starts when its bucket has arrived, so buckets of a failed publication may arrive during the
                next one of the same version, with other weights.
        """
        engine, receiver = self._running()
        async with self._publishing:
            if publication != self._publication:
                raise WeightsError(f"{self.name} refuses bucket {bucket.index} of publication {publication}: the latest"
                                   f" is {self._publication}; publish the weights again")
            if isinstance(bucket, WeightBucket):
                await asyncio.to_thread(receiver.load, bucket)
            else:
                receiver.expect(bucket)
                await cast(AsynchronousEngine, engine).receive(bucket)

    async def connect_weights(self, route: WeightRoute, offset: int) -> None:
        """Prepare to receive weights from GPU to GPU.

        Args:
            offset: rank of this generator's first process in a broadcast; the learner is rank 0.
        """
        engine, _ = self._running()
        async with self._publishing:
            await cast(AsynchronousEngine, engine).connect(transfer_info(route, offset))

    def devices(self) -> int:
        """Number of processes that each hold a part of the model."""
        return self._generation.devices

    async def sleep(self) -> None:
        """Free GPU memory for other roles, as `generator.sleep_level` sets.

        Raises:
            WorkerError: requests are open. vLLM would keep them, and wait for them to be over when it wakes.
        """
        engine, _ = self._running()
        if still_open := await self.open_requests(0.0):
            raise WorkerError(f"{self.name} cannot sleep, because it has open requests: {still_open}", "generator")
        await cast(AsynchronousEngine, engine).sleep(self._generation.sleep_level)

    async def wake(self, parts: list[str]) -> None:
        """Allocate GPU memory again: "weights" before a publication, "kv_cache" after it."""
        engine, _ = self._running()
        await cast(AsynchronousEngine, engine).wake(parts)

    async def finish_weights(self, version: int) -> WeightsConfirmed:
        """Apply the publication between two tokens, and confirm its version by returning it.

        Responses in flight continue with the new weights; each token records the version that sampled it.

        Raises:
            WeightsError: the publication is incomplete; see `Receiver.finish`. The old weights stay, but the generator
                does not generate with them.
            WorkerError: vLLM failed while loading; this generator must be restarted.
        """
        engine, receiver = self._running()
        async with self._publishing:
            stage = receiver.finish(version)
            try:
                pause = await engine.apply(stage, version)
            except WeightsError as error:
                receiver.fail(str(error))
            return WeightsConfirmed(receiver.confirm(), pause)

    def version(self) -> int:
        """The confirmed version of the weights."""
        return self._running()[1].version

    def tokens_made(self) -> int:
        """Tokens sampled since the start, including unfinished responses. No increase under load means it hangs."""
        return self._running()[0].tokens_made()

    def activity(self) -> GeneratorActivity:
        """Its open requests, whoever called, and its progress."""
        calls = self._open_calls.values()
        oldest_s = time.monotonic() - min(call.began for call in calls) if calls else 0.0
        return GeneratorActivity(sum(len(call.requests) for call in calls), oldest_s, self.tokens_made())

    async def open_requests(self, wait_s: float) -> str:
        """Wait until the engine has no request, for at most `wait_s` seconds. Requests that no call waits for are
        aborted. Returns the requests that are still open, in words; empty if there are none.

        Raises:
            WorkerError: the engine died.
        """
        engine, _ = self._running()
        if self._open_calls and wait_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), wait_s)
        in_engine = await engine.end_orphans()
        now = time.monotonic()
        calls = [call.described(now) for call in self._open_calls.values()]
        if in_engine and not calls:
            return f"{in_engine} requests of vLLM that no call waits for and that it does not abort"
        more = f", and {len(calls) - SHOWN_CALLS} calls more" if len(calls) > SHOWN_CALLS else ""
        return ", ".join(calls[:SHOWN_CALLS]) + more

    async def begin_profile(self) -> None:
        """Start profiling the engine."""
        await self._running()[0].begin_profile()

    async def end_profile(self, trace: str) -> WorkerProfile | None:
        """Write the profile to the file `trace` and return its summary; None if none was recorded."""
        return await self._running()[0].end_profile(Path(trace))

    async def drop_profile(self) -> None:
        """Stop profiling and discard the profile."""
        await self._running()[0].drop_profile()

    async def stop(self) -> None:
        """Shut the engine down; call it before killing the process, so that vLLM's processes end too."""
        if self._engine is not None:
            await self._engine.stop()
        self._engine = self._receiver = None

    def _running(self) -> tuple[SamplingEngine, Receiver[Any]]:
        if self._engine is None or self._receiver is None:
            raise WorkerError(f"{self.name} is not running; call start first")
        return self._engine, self._receiver

    def _ready_engine(self) -> SamplingEngine:
        """The engine, whose weights are those of a confirmed version.

        Raises:
            WeightsError: they are not.
        """
        engine, receiver = self._running()
        receiver.require_ready()
        return engine

    def _require_room(self, request: SampleRequest) -> None:
        length = len(request.prompt)
        if not length or request.max_tokens < 1 or length + request.max_tokens > self._max_context:
            raise DataError(
                f"{self.name}: a request has a prompt of {length} tokens and asks for at most {request.max_tokens} "
                f"more; each needs at least 1, and both together at most {self._max_context} (the context): shorten "
                "the prompt, ask for fewer tokens, or raise the context")

    def _request(self, prompt: list[int], key: SampleKey, run_seed: int, sampling: SamplingConfig) -> SampleRequest:
        available = self._max_context - len(prompt)
        if not prompt or available < 1:
            raise DataError(
                f"the prompt in row {key.row} has {len(prompt)} tokens; responses need 1 to {self._max_context - 1} "
                f"(the context is {self._max_context}): lower prompts.max_tokens or raise the context"
            )
        most = min(sampling.max_tokens, available)
        masks = self._records_masks(sampling)
        return sample_request(prompt, sampling, most, sample_seed(run_seed, key), self._stop_tokens,
                              self._vocabulary if masks else 0)

    def _records_masks(self, sampling: SamplingConfig) -> bool:
        return self._record_masks and sampling.same_distribution(self._generation.sampling)

    def _require_whole_masks(self, requests: Sequence[SampleRequest], completions: Sequence[Completion]) -> None:
        for request, completion in zip(requests, completions, strict=True):
            if any(len(mask) == request.top_logprobs < self._vocabulary for mask in completion.masks):
                raise ModelError(
                    f"{self.name}: with generator.sampling.top_k={request.sampling.top_k} a token was sampled among at "
                    f"least {request.top_logprobs} tokens, because so many are equally likely, and its sampling mask "
                    "is not completely known; set top_k to 0")


def build_engine(settings: EngineSettings, in_flight: Literal["keep", "abort"] = "keep") -> SamplingEngine:
    """The configured engine; vLLM is imported when it starts."""
    engine: AbortableEngine
    if settings.generation.engine_kind == "async":
        engine = AsynchronousEngine(settings)
    else:
        from rlhf_ray.roles.engines.in_process import InProcessEngine

        engine = InProcessEngine(settings)
    return engine if in_flight == "keep" else cast(SamplingEngine, PartialRolloutEngine(engine))


def transfer_info(route: WeightRoute, offset: int) -> dict[str, Any]:
    """Initialisation of vLLM's back-end of a transport; `packed` must match the learner's trainer engine."""
    if route.transport == "ipc":
        return {"packed": False}
    if route.transport == "gloo":
        return {"address": route.address, "rank_offset": offset, "world_size": route.world}
    return {"nccl_unique_id_b64": route.nccl_id, "rank_offset": offset, "world_size": route.world, "packed": True}
