"""Responses that are cut by an update and continued, over an engine whose tokens are made by hand."""

import asyncio

import numpy as np

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.engines.partial_rollouts import PartialRolloutEngine, resumed_seed

REQUEST = SampleRequest([1, 2], SamplingConfig(max_tokens=5), 5, seed=7, stop_tokens=[0])


class ScriptedEngine:
    """Makes a token a millisecond; token t of a request is its seed + t, made by the present version."""

    kind = "scripted"

    def __init__(self):
        self.version, self.requests, self.ending = 0, [], asyncio.Event()

    async def sample(self, requests):
        self.requests.append(list(requests))
        return list(await asyncio.gather(*(self._draw(request) for request in requests)))

    async def _draw(self, request):
        tokens, versions = [], []
        while len(tokens) < request.max_tokens:
            await asyncio.sleep(0.001)
            if self.ending.is_set():
                break
            tokens.append(request.seed % 1000 + len(tokens))
            versions.append(self.version)
        reason = "length" if len(tokens) == request.max_tokens else "abort"
        return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32),
                          np.array(versions, np.int32), reason)

    async def abort_samples(self):
        self.ending.set()
        await asyncio.sleep(0.005)
        self.ending.clear()

    async def apply(self, staged, version):
        assert staged == "weights"
        await asyncio.sleep(0.005)
        self.version = version
        return 0.5


def cut_after(tokens, requests, updates=1):
    """(completions, the engine) of requests that as many updates meet, each after so many tokens more."""

    async def run():
        inner = ScriptedEngine()
        engine = PartialRolloutEngine(inner)
        drawing = asyncio.ensure_future(engine.sample(requests))
        for version in range(1, updates + 1):
            while not inner.requests or (tokens and inner.version < version - 1):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0012 * tokens)
            assert await engine.apply("weights", version) == 0.5
        return await drawing, inner

    return asyncio.run(run())


def test_without_an_update_nothing_is_different():
    (completion,), inner = cut_after(0, [REQUEST], updates=0)
    assert completion.tokens.tolist() == [7, 8, 9, 10, 11] and completion.finish_reason == "length"
    assert inner.requests == [[REQUEST]]


def test_a_cut_response_goes_on_after_what_it_had_with_the_new_weights():
    (completion,), inner = cut_after(2, [REQUEST])
    ((first,), (second,)) = inner.requests
    had = 5 - second.max_tokens
    assert first == REQUEST and 0 < had < 5
    assert second.prompt == [1, 2, *completion.tokens[:had]] and second.seed == resumed_seed(7, had)
    assert completion.versions.tolist() == [0] * had + [1] * (5 - had)
    assert completion.finish_reason == "length" and len(completion.logprobs) == 5


def test_a_request_that_had_no_token_yet_is_the_same_request_again():
    (completion,), inner = cut_after(0, [REQUEST])
    assert inner.requests == [[REQUEST], [REQUEST]]
    assert completion.tokens.tolist() == [7, 8, 9, 10, 11] and set(completion.versions) == {1}


def test_only_those_in_flight_go_on_and_every_response_comes_back_in_its_place():
    short = SampleRequest([3], SamplingConfig(max_tokens=1), 1, seed=50, stop_tokens=[0])
    completions, inner = cut_after(2, [REQUEST, short, REQUEST])
    assert [len(batch) for batch in inner.requests] == [3, 2]
    assert [c.tokens[0] for c in completions] == [7, 50, 7] and [len(c.tokens) for c in completions] == [5, 1, 5]


def test_a_response_may_be_cut_more_than_once():
    (completion,), inner = cut_after(1, [REQUEST], updates=3)
    assert len(inner.requests) == 4 and len(completion.tokens) == 5
    assert sorted(completion.versions) == completion.versions.tolist() and completion.versions[-1] == 3


def test_the_seed_of_the_rest_follows_from_seed_and_length_alone():
    seeds = {resumed_seed(seed, count) for seed in range(50) for count in range(1, 50)}
    assert len(seeds) == 50 * 49 and all(0 <= seed < 2**63 for seed in seeds)
    assert (resumed_seed(7, 3), resumed_seed(0, 1)) == (6957114533726009097, 4745132817472036307), "on any machine"
