"""The generator around its engine: a stand-in engine answers, all else is real. vLLM itself: tests/cluster."""

import asyncio
import base64
import os
from dataclasses import replace
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.errors import DataError, ModelError, WeightsError, WorkerError
from rlhf_ray.records import GivenTokens, Prompts, SampleKey, TensorEntry, WeightRoute, offsets_of
from rlhf_ray.roles import generator as module
from rlhf_ray.roles.engines.async_llm import AsynchronousEngine
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.engines.partial_rollouts import PartialRolloutEngine
from rlhf_ray.roles.generator import Generator, build_engine, transfer_info
from rlhf_ray.roles.local_generator import LocalGenerator, local_generation_config
from rlhf_ray.roles.prompt_input import PromptInput
from rlhf_ray.weights.manifest import fused_groups
from rlhf_ray.weights.publication import SealedBuckets
from tests.models import make_tiny_llama
from tests.unit.roles.conftest import VOCABULARY

SAMPLING = SamplingConfig(max_tokens=4)


class Stage:
    def __init__(self):
        self.names = []

    def add(self, tensors):
        self.names += [entry.name for entry, _ in tensors]


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Engine:
    """Answers each request with its last prompt token and the end of sequence, and remembers what it was asked."""

    def __init__(self):
        self.calls, self.requests, self.broken, self.masks = [], [], None, ()

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append((name, *arguments))
            if name == "apply" and self.broken:
                raise self.broken

            return {"apply": 0.25, "end_profile": "profile", "fused_layers": FUSED}.get(name)

        return call

    async def sample(self, requests):
        if self.broken:
            raise self.broken
        self.requests.append(list(requests))
        if requests[0].scores_prompt:
            return [Completion(np.array([1], np.int32), np.array([-0.5], np.float32), np.array([6], np.int32), "length",
                               (), -np.arange(len(r.prompt), dtype=np.float32)) for r in requests]
        return [Completion(np.array([r.prompt[-1], 1], np.int32), np.array([-0.5, -0.25], np.float32),
                           np.array([3, 4], np.int32), "stop", self.masks) for r in requests]

    def open_stage(self):
        return Stage()

    def tokens_made(self):
        return 7


@pytest.fixture
def engine(monkeypatch):
    """The engine of the next generator; `settings` and `in_flight` are what it was built with."""
    engine = Engine()

    def build(settings, in_flight):
        engine.settings, engine.in_flight = settings, in_flight
        return engine

    monkeypatch.setattr(module, "build_engine", build)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return engine


@pytest.fixture
def generator(engine, policy_model):
    """A started generator; its trial's request is forgotten."""
    generation = GenerationConfig(sampling=SAMPLING, gpus=1, sleep_level=2)
    it = Generator(policy_model, generation, 5, 8, "generator/1", "abort", "nccl")
    asyncio.run(it.start())
    engine.trial, engine.requests, engine.calls = engine.requests, [], []
    return it


def test_given_tokens_are_scored_by_requests_that_sample_one_token_and_go_first(generator, engine):
    rows = GivenTokens(np.array([0, 3, 5]), np.array([5, 6, 7, 8, 9], np.int32),
                       np.array([False, True, True, False, True]))
    values, version = asyncio.run(generator.given_logprobs(rows))
    assert values.tolist() == [-1.0, -2.0, -1.0] and version == 6
    [requests] = engine.requests
    assert [request.prompt for request in requests] == [[5, 6, 7], [8, 9]]
    assert {(request.max_tokens, request.priority) for request in requests} == {(1, -1)}


def test_a_generator_of_a_large_model_loads_it_no_second_time_to_compare_it(generator, engine, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_COMPARED", 1000)
    assert asyncio.run(generator.compare_with_transformers()) is None and not engine.requests


def prompts(*rows, numbers=None):
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows]) if rows else np.empty(0, np.int32)
    return Prompts(offsets_of([len(row) for row in rows]), tokens, [""] * len(rows), [{}] * len(rows),
                   np.array(numbers if numbers is not None else range(len(rows))))


def test_a_start_builds_the_engine_it_is_configured_for_and_draws_one_token(generator, engine, policy_model):
    settings = engine.settings
    assert (settings.model, settings.generation.sampling, settings.max_context, settings.seed, settings.name) == (
        policy_model, SAMPLING, 8, 5, "generator/1")
    assert (settings.architectures, settings.transport, engine.in_flight) == (["LlamaForCausalLM"], "nccl", "abort")
    assert settings.shapes["model.embed_tokens.weight"] == (VOCABULARY, 32)
    [[trial]] = engine.trial
    assert (trial.prompt, trial.max_tokens, trial.sampling.max_tokens, trial.stop_tokens) == ([1], 1, 1, [1])
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_a_started_generator_has_version_zero_and_counts_tokens(generator):
    assert generator._receiver.version == 0 and generator.tokens_made() == 7
    assert generator.devices() == GenerationConfig().devices


def test_a_model_that_the_engine_cannot_run_is_refused_at_the_start(engine, policy_model):
    engine.broken = WorkerError("no kernel")
    with pytest.raises(ModelError, match=f"{policy_model.path}.*no kernel"):
        asyncio.run(Generator(policy_model, GenerationConfig(), 5, 8).start())


def test_each_key_gets_its_prompt_its_seed_and_the_room_that_is_left(generator, engine):
    keys = [SampleKey(2, 30, 1), SampleKey(2, 10, 0)]
    rollout = asyncio.run(generator.generate(prompts([2, 3], [4, 5, 6, 7, 8, 9], numbers=[10, 30]), keys, run_seed=9))
    [requests] = engine.requests
    assert [r.prompt for r in requests] == [[4, 5, 6, 7, 8, 9], [2, 3]]
    assert [r.max_tokens for r in requests] == [2, 4], "a context of 8"
    assert [r.seed for r in requests] == [sample_seed(9, key) for key in keys]
    assert [r.stop_tokens for r in requests] == [[1], [1]] and all(r.sampling == SAMPLING for r in requests)
    assert rollout.tokens.tolist() == [4, 5, 6, 7, 8, 9, 9, 1, 2, 3, 3, 1] and rollout.tokens.dtype == np.int32
    assert rollout.offsets.tolist() == [0, 8, 12] and rollout.keys == keys
    assert rollout.versions.tolist() == [-1] * 6 + [3, 4, -1, -1, 3, 4] and rollout.versions.dtype == np.int32
    assert rollout.response_mask.tolist() == [False] * 6 + [True, True, False, False, True, True]
    assert rollout.logprobs.tolist() == [0] * 6 + [-0.5, -0.25, 0, 0, -0.5, -0.25]
    assert rollout.logprobs.dtype == np.float32
    assert rollout.seeds.tolist() == [r.seed for r in requests] and rollout.seeds.dtype == np.int64
    assert rollout.finish_reasons == ["stop", "stop"]


def sample_request(prompt, max_tokens=2, seed=11):
    return SampleRequest(prompt, SAMPLING, max_tokens, seed, [1])


def test_a_caller_s_own_requests_are_sampled_as_they_are(generator, engine):
    """A rollout is made of the same completions."""
    requests = [sample_request([2, 3], seed=1), sample_request([4], seed=2)]
    completions = asyncio.run(generator.sample(requests))
    assert engine.requests == [requests]
    assert [c.tokens.tolist() for c in completions] == [[3, 1], [4, 1]]
    assert [(c.logprobs.tolist(), c.versions.tolist(), c.finish_reason) for c in completions] == [
        ([-0.5, -0.25], [3, 4], "stop")] * 2


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 2), ([2] * 8, 1), ([2] * 5, 4), ([2], 0)])
def test_a_request_that_does_not_fit_the_context_is_refused_and_no_other_is_sampled(
        generator, engine, prompt, max_tokens):
    said = rf"generator/1: a request has a prompt of {len(prompt)} tokens and asks for at most {max_tokens} more; .* 8 "
    with pytest.raises(DataError, match=said):
        asyncio.run(generator.sample([sample_request([2]), sample_request(prompt, max_tokens)]))
    assert engine.requests == [] and generator.activity().requests == 0
    asyncio.run(generator.sample([sample_request([2] * 5, 3)]))


def test_requests_are_open_while_the_engine_samples_them_whoever_called(generator, engine, monkeypatch):
    now, sampling = 100.0, asyncio.Event()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    answer = engine.sample

    async def slow(requests):
        await sampling.wait()
        return await answer(requests)

    async def look():
        nonlocal now
        found = [generator.activity()]
        engine.sample = slow
        calls = [asyncio.create_task(generator.sample([sample_request([2]), sample_request([3])]))]
        await asyncio.sleep(0)
        now += 5.0
        calls.append(asyncio.create_task(generator.generate(prompts([2]), [SampleKey(0, 0, 0)], 9)))
        await asyncio.sleep(0)
        found.append(generator.activity())
        calls[0].cancel()
        now += 1.0
        await asyncio.sleep(0)
        found.append(generator.activity())
        sampling.set()
        await calls[1]
        return [*found, generator.activity()]

    assert asyncio.run(look()) == [(0, 0.0, 7), (3, 5.0, 7), (1, 1.0, 7), (0, 0.0, 7)]


def masked(engine, policy_model, sampling, masks, asked=None, record=True):
    """The rollout of two prompts, and the one request's settings; the engine returns these masks of its two tokens."""
    engine.masks = tuple(np.array(mask, np.int32) for mask in masks)
    it = Generator(policy_model, GenerationConfig(sampling=sampling), 5, 8, record_masks=record)
    asyncio.run(it.start())
    keys = [SampleKey(0, 1, 0), SampleKey(0, 0, 0)]
    return asyncio.run(it.generate(prompts([2, 3], [4]), keys, 9, asked)), engine.requests[-1][0]


def test_kept_tokens_are_recorded_for_learners_token_by_token(engine, policy_model):
    rollout, request = masked(engine, policy_model, SamplingConfig(top_k=3), [[4, 1], [1, 9, 7]])
    assert request.top_logprobs == 6
    assert rollout.mask_sizes.tolist() == [0, 2, 3, 0, 0, 2, 3] and rollout.mask_sizes.dtype == np.int32
    assert rollout.mask_tokens.tolist() == [4, 1, 1, 9, 7, 4, 1, 1, 9, 7] and rollout.mask_tokens.dtype == np.int32


def test_end_tokens_are_recorded_as_impossible_before_the_minimum_length(engine, policy_model):
    rollout, request = masked(engine, policy_model, SamplingConfig(min_tokens=1, stop_token_ids=[7]), [])
    assert request.top_logprobs == 0 and request.stop_tokens == [1, 7]
    assert rollout.mask_sizes.tolist() == [0, -2, 0, 0, 0, -2, 0] and rollout.mask_tokens.tolist() == [1, 7, 1, 7]


@pytest.mark.parametrize(("asked", "record"), [
    (SamplingConfig(top_k=4), True), (SamplingConfig(), True), (None, False),
    (SamplingConfig(top_k=3, stop=["x"], max_tokens=2), None)])
def test_only_training_s_own_distribution_is_recorded(engine, policy_model, asked, record):
    rollout, request = masked(engine, policy_model, SamplingConfig(top_k=3), [[4], [1]] if record is None else [],
                              asked, record is not False)
    assert (rollout.mask_sizes is not None) == (record is None) == (request.top_logprobs == 6)


def test_more_equally_likely_tokens_than_were_returned_are_refused(engine, policy_model):
    with pytest.raises(ModelError, match=r"top_k=1 .* at least 2.* set top_k to 0"):
        masked(engine, policy_model, SamplingConfig(top_k=1), [[4, 1], [1]])
    everything = range(VOCABULARY)
    rollout, request = masked(engine, policy_model, SamplingConfig(top_k=VOCABULARY), [everything, everything])
    assert request.top_logprobs == VOCABULARY and len(rollout.mask_tokens) == 4 * VOCABULARY


def test_another_sampling_takes_the_place_of_the_configured_one(generator, engine):
    other = SamplingConfig(max_tokens=3, temperature=0.5)
    asyncio.run(generator.generate(prompts([2]), [SampleKey(0, 0, 0)], 9, other))
    [[request]] = engine.requests
    assert request.sampling == other and request.max_tokens == 3


@pytest.mark.parametrize("length", [0, 8])
def test_a_prompt_without_tokens_or_room_is_refused_with_its_row(generator, length):
    with pytest.raises(DataError, match=rf"row 4 has {length} tokens; responses need 1 to 7 \(the context is 8\)"):
        asyncio.run(generator.generate(prompts([2] * length, numbers=[4]), [SampleKey(0, 4, 0)], 9))


def test_a_prompt_one_token_shorter_than_the_context_gets_one_token(generator, engine):
    asyncio.run(generator.generate(prompts([2] * 7), [SampleKey(0, 0, 0)], 9))
    assert engine.requests[0][0].max_tokens == 1


@pytest.fixture(scope="module")
def published(policy_model):
    """Buckets of one publication of random weights, of the version asked for, and names that stay together."""
    from rlhf_ray.models.config_json import pretrained_config
    from rlhf_ray.models.loading import parameter_shapes

    shapes = parameter_shapes(pretrained_config(policy_model), False)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    sealed = SealedBuckets([(name, shape, "float32") for name, shape in shapes.items()], list(shapes), 20_000,
                           lambda names: {name: tensors[name] for name in names})
    return lambda version: [sealed.bucket(version, i, True) for i in range(sealed.plan.whole.buckets)]


async def publish(generator, buckets, version, number=1, **options):
    await generator.begin_weights(number, version, len(buckets), **options)
    for bucket in buckets:
        await generator.load_weights(bucket, number)
    return await generator.finish_weights(version)


def test_a_publication_is_applied_once_it_is_whole(generator, engine, published):
    confirmed = asyncio.run(publish(generator, published(3), 3))
    assert (confirmed.version, confirmed.pause_seconds) == (3, 0.25)
    [(name, stage, version)] = engine.calls
    assert (name, version) == ("apply", 3) and set(stage.names) == set(engine.settings.shapes)
    assert generator._receiver.version == 3
    assert len(asyncio.run(generator.generate(prompts([2]), [SampleKey(0, 0, 0)], 9))) == 1
    with pytest.raises(WeightsError, match="refuses version 2"):
        asyncio.run(generator.begin_weights(2, 2, 1))
    assert asyncio.run(publish(generator, published(2), 2, number=3, resend=True)).version == 2


def test_weights_that_do_not_fit_stop_generation_until_they_are_published_again(generator, engine, published):
    engine.broken = WeightsError("of another shape")
    with pytest.raises(WeightsError, match="of another shape"):
        asyncio.run(publish(generator, published(3), 3))
    engine.broken = None
    assert generator._receiver.version == 0
    for sampling in (generator.generate(prompts([2]), [SampleKey(0, 0, 0)], 9), generator.sample([])):
        with pytest.raises(WeightsError, match="does not generate"):
            asyncio.run(sampling)


def test_weights_of_one_fused_layer_stay_together(generator, engine):
    together = generator.fused_groups()
    assert ["model.layers.0.self_attn.q_proj.weight" in group for group in together].count(True) == 1
    assert together == fused_groups(engine.settings.shapes, FUSED)


def test_calls_for_the_engine_reach_it(generator, engine):
    route = WeightRoute("nccl", world=3, nccl_id="id")

    async def all_calls():
        await generator.connect_weights(route, 2)
        await generator.sleep()
        await generator.wake(["weights"])
        await generator.begin_profile()
        profile = await generator.end_profile("/somewhere/trace.json")
        await generator.drop_profile()
        await generator.stop()
        return profile

    assert asyncio.run(all_calls()) == "profile"
    assert [(name, *map(str, arguments)) for name, *arguments in engine.calls] == [
        ("connect", str(transfer_info(route, 2))), ("end_orphans",), ("sleep", "2"), ("wake", "['weights']"),
        ("begin_profile",), ("end_profile", "/somewhere/trace.json"), ("drop_profile",), ("stop",)]
    with pytest.raises(WorkerError, match="generator/1 is not running; call start first"):
        generator.tokens_made()
    asyncio.run(generator.stop())


def test_an_offer_from_gpu_to_gpu_is_expected_and_fetched_by_the_engine(generator, engine, published, monkeypatch):
    expected = []
    monkeypatch.setattr(generator._receiver, "expect", expected.append)

    async def offer():
        await generator.begin_weights(1, 3, 1)
        await generator.load_weights("an offer", 1)

    asyncio.run(offer())
    assert expected == ["an offer"] and engine.calls == [("receive", "an offer")]


def test_what_vllms_transports_are_given():
    """NCCL's id reaches every process of an engine through calls: vLLM opens a store that unpickles what it holds if it
    is given an address."""
    unique_id = base64.b64encode(bytes(range(128))).decode()
    nccl = NCCLWeightTransferInitInfo(**transfer_info(WeightRoute("nccl", world=3, nccl_id=unique_id), 2))
    assert nccl.nccl_unique_id_bytes == bytes(range(128)) and nccl.master_address is None
    assert (nccl.rank_offset, nccl.world_size, nccl.packed) == (2, 3, True)
    assert transfer_info(WeightRoute("ipc"), 1) == {"packed": False}
    assert transfer_info(WeightRoute("gloo", world=2, address="tcp://here:5"), 1) == {
        "address": "tcp://here:5", "rank_offset": 1, "world_size": 2}


def test_the_engine_is_the_configured_one(generator, engine, monkeypatch):
    settings = replace(engine.settings, generation=GenerationConfig(engine="async"))
    assert type(build_engine(settings)) is AsynchronousEngine
    assert type(build_engine(settings, "abort")) is PartialRolloutEngine
    monkeypatch.setattr(module, "AsynchronousEngine", lambda given: ("asynchronous", given))
    monkeypatch.setattr(module, "PartialRolloutEngine", lambda inner: ("partial", inner))
    assert build_engine(settings, "abort") == ("partial", ("asynchronous", settings))


def test_bytes_that_arrive_on_a_direct_transport_are_not_confirmed(generator, engine, monkeypatch):
    direct = AsynchronousEngine(replace(engine.settings, transport="nccl"))
    monkeypatch.setattr(direct, "_living", lambda: None)
    stage = direct.open_stage()
    stage.add([])
    with pytest.raises(WeightsError, match="a bucket of bytes arrived"):
        asyncio.run(direct.apply(stage, 1))


@pytest.mark.parametrize("mapped", [True, False])
def test_files_of_a_publication_are_kept_for_the_next_unless_a_process_of_vllm_still_maps_them(
        generator, engine, monkeypatch, mapped):
    asynchronous = AsynchronousEngine(replace(engine.settings, transport="object_store"))
    vllm = AsyncMock()
    monkeypatch.setattr(asynchronous, "_living", lambda: vllm)

    async def publish(version):
        stage = asynchronous.open_stage()
        stage.add([(TensorEntry("w", "uint8", (10,), 10), np.full(10, version, np.uint8))])
        inode = stage.buckets[0].file.inode
        vllm.collective_rpc.return_value = [[], [inode]] if mapped else [[], []]
        await asynchronous.apply(stage, version)
        return inode

    first, second = asyncio.run(publish(1)), asyncio.run(publish(2))
    assert (first == second) == (not mapped)
    asyncio.run(asynchronous.stop())
    assert not asynchronous._kept


@pytest.fixture
def local(engine, tmp_path_factory, monkeypatch):
    """local(prompts, **options): a started local generator of a model with a context of 24."""
    model = ModelConfig(path=str(make_tiny_llama(tmp_path_factory.mktemp("local") / "policy", vocab=VOCABULARY,
                                                 hidden=64, layers=3, heads=2, positions=24)))

    async def compared(self):
        engine.compared = True

    monkeypatch.setattr(module.Generator, "compare_with_transformers", compared)

    def start(asked=(), sampling=SAMPLING, **options):
        it = LocalGenerator(model, sampling, 3, False, 2)
        asyncio.run(it.start([PromptInput(text, f"line {i}", {"n": i}) for i, text in enumerate(asked)], **options))
        engine.requests = []
        return it

    return start


@pytest.mark.parametrize(("asked", "options", "context"), [
    (["w2 w3", "w2 w3 w4"], {}, 7), (["w2"], {"prompt_tokens": 9}, 13), (["w2"], {"prompt_tokens": 90}, 24),
    ((), {}, 4),
])
def test_the_local_context_holds_the_longest_prompt_and_a_response(local, engine, asked, options, context):
    it = local(asked, **options)
    assert it.context == engine.settings.max_context == context and engine.compared
    assert (engine.settings.seed, engine.settings.name) == (3, "policy")


def test_a_prompt_as_long_as_the_models_context_is_refused(local):
    assert local(["w2 " * 23]).context == 24
    with pytest.raises(DataError, match="a prompt has 24 tokens, and the context of .* is 24; shorten the prompt"):
        local(["w2 " * 24])


def test_a_local_generator_takes_all_cores_and_a_cache_for_its_sequences(local, engine):
    local()
    generation = engine.settings.generation
    assert generation.threads == len(os.sched_getaffinity(0)) and generation.max_sequences == 2
    assert generation.kv_cache_mb == 64, "the least"


def test_the_cache_holds_keys_and_values_of_every_layer_and_head_in_whole_blocks(monkeypatch):
    from transformers import LlamaConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = LlamaConfig(num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4, hidden_size=1024)
    float32, bfloat16 = (ModelConfig(path="m", dtype=dtype) for dtype in ("float32", "bfloat16"))
    # A token: 2 (keys, values) * 10 layers * 4 heads * 128 numbers. 1000 tokens are 8 blocks of 128, and one more.
    numbers = 2 * 10 * 4 * 128 * 9 * 128 * 16
    assert local_generation_config(config, float32, 1000, 16).kv_cache_mb == -(-numbers * 4 // 2**20)
    assert local_generation_config(config, bfloat16, 1000, 16).kv_cache_mb == -(-numbers * 2 // 2**20)
    wide = LlamaConfig(num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4, hidden_size=1024,
                       head_dim=256)
    assert local_generation_config(wide, float32, 1000, 16).kv_cache_mb == 2 * -(-numbers * 4 // 2**20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu = local_generation_config(config, float32, 1000, 16)
    assert (on_gpu.gpus, on_gpu.engine, on_gpu.max_sequences) == (1, "in_process", 16)


def answers(it, asked, **options):
    async def run():
        inputs = [PromptInput(text, f"line {i}", {"n": i}) for i, text in enumerate(asked)]
        return [batch async for batch in it.generate(inputs, **options)]

    return asyncio.run(run())


def test_responses_come_in_order_sixteen_prompts_at_a_time(local, engine):
    asked = [f"w{2 + i}" for i in range(18)]
    it = local(asked)
    batches = answers(it, asked, samples=2, epoch=5)
    assert [len(batch) for batch in batches] == [32, 4]
    requests = [request for batch in batches for request in batch]
    assert [r.prompt for r in requests] == [text for text in asked for _ in range(2)]
    assert [r.metadata["n"] for r in requests] == [i for i in range(18) for _ in range(2)]
    assert [r.response for r in requests] == [r.prompt for r in requests], "the engine repeats the last token"
    seeds = [r.seed for call in engine.requests for r in call]
    assert seeds == [sample_seed(3, SampleKey(5, row, sample)) for row in range(18) for sample in range(2)]
    assert all(r.sampling == SAMPLING for call in engine.requests for r in call)


def test_a_local_prompt_that_leaves_no_room_is_refused_with_its_place(local):
    it = local(["w2 w3 w4"])
    assert len(answers(it, ["w2 " * 6])) == 1
    with pytest.raises(DataError, match="line 1: the prompt has 7 tokens, and prompts of 1 to 6 fit"):
        answers(it, ["w2", "w2 " * 7])


def test_a_local_generator_stops_its_engine(local, engine):
    it = local()
    asyncio.run(it.stop())
    assert ("stop",) in engine.calls
