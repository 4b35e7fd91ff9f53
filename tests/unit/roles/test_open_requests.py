"""What an engine still has to sample: requests of calls, of cancelled calls, and of nobody. vLLM's engines are
stand-ins; vLLM itself: tests/cluster."""

import asyncio
import re
import threading
import time
from types import SimpleNamespace

import pytest

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.errors import WorkerError
from rlhf_ray.roles import generator as module
from rlhf_ray.roles.engines import async_llm, in_process
from rlhf_ray.roles.engines.async_llm import AsynchronousEngine
from rlhf_ray.roles.engines.in_process import InProcessEngine
from rlhf_ray.roles.engines.interface import SampleRequest
from rlhf_ray.roles.generator import Generator

SETTINGS = SimpleNamespace(name="generator/1", generation=SimpleNamespace(gpus=1), decode=None)


def request(seed=11):
    return SampleRequest([5, 6], SamplingConfig(max_tokens=4), 2, seed, [1])


class Processor:
    """vLLM's record of open requests, by an id of its own."""

    def __init__(self):
        self.request_states, self.external_req_ids = {}, {}

    def add(self, request_id):
        self.request_states[f"{request_id}-x"] = SimpleNamespace(external_req_id=request_id, detokenizer=None)


class LLMEngine:
    """Steps as long as it has requests, which never finish. `may_step` holds it up in a step."""

    def __init__(self):
        self.output_processor, self.may_step, self.log = Processor(), threading.Event(), []
        self.may_step.set()

    def add_request(self, request_id, *_, **__):
        self.output_processor.add(request_id)

    def has_unfinished_requests(self):
        return bool(self.output_processor.request_states)

    def step(self):
        time.sleep(0.001)
        assert self.may_step.wait(20)
        return []

    def abort_request(self, request_ids):
        self.log += request_ids
        for request_id in request_ids:
            self.output_processor.request_states.pop(f"{request_id}-x", None)


@pytest.fixture
def stepped(monkeypatch):
    """An in-process engine over a stand-in of vLLM's, and that."""
    monkeypatch.setattr(in_process, "prompt_of", list)
    monkeypatch.setattr(in_process, "sampling_parameters", lambda request: None)
    monkeypatch.setattr(in_process, "shut_down", lambda engine: None)
    monkeypatch.setattr(InProcessEngine, "_release", lambda self: None)
    engine = InProcessEngine(SETTINGS)
    engine._engine = vllm = LLMEngine()
    engine._thread.start()
    yield engine, vllm
    vllm.may_step.set()
    asyncio.run(engine.stop())


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_cancelled_call_ends_when_the_engine_has_aborted_its_requests_however_often_it_is_cancelled(stepped):
    engine, vllm = stepped

    async def run():
        calls = [asyncio.create_task(engine.sample([request(), request()])) for _ in range(2)]
        await until(lambda: len(vllm.output_processor.request_states) == 4)
        vllm.may_step.clear()
        await asyncio.sleep(0.02)  # until it is in a step
        for _ in range(3):
            calls[0].cancel()
            await asyncio.sleep(0.01)
            assert not calls[0].done(), "vLLM makes a step, and still has the requests"
        vllm.may_step.set()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        assert vllm.log == ["0", "1"] and len(vllm.output_processor.request_states) == 2
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return vllm.output_processor.request_states

    assert asyncio.run(run()) == {}


def test_a_call_that_is_cancelled_as_the_engine_stops_ends(stepped):
    engine, vllm = stepped

    async def run():
        call = asyncio.create_task(engine.sample([request()]))
        await until(lambda: vllm.output_processor.request_states)
        await engine.stop()
        call.cancel()
        return await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), 5)

    [error] = asyncio.run(run())
    assert isinstance(error, WorkerError | asyncio.CancelledError)


def test_requests_that_no_call_waits_for_are_aborted_and_others_are_not(stepped):
    engine, vllm = stepped

    async def run():
        call = asyncio.create_task(engine.sample([request()]))
        await until(lambda: vllm.output_processor.request_states)
        vllm.output_processor.add("orphan")
        left = await engine.end_orphans()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return left, vllm.log, await engine.end_orphans()

    assert asyncio.run(run()) == (1, ["orphan", "0"], 0)


class AsyncLLM:
    """Requests never finish. A cancelled one stays, as where vLLM was adding it."""

    def __init__(self):
        self.output_processor, self.aborted = Processor(), []

    async def generate(self, prompt, parameters, request_id, **_):
        self.output_processor.add(request_id)
        await asyncio.sleep(1000)
        yield

    async def abort(self, request_ids):
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        await asyncio.sleep(0.01)
        self.aborted += ids
        for request_id in ids:
            self.output_processor.request_states.pop(f"{request_id}-x", None)


def test_vllm_in_processes_of_its_own_aborts_cancelled_requests_and_those_of_nobody(monkeypatch):
    monkeypatch.setattr(async_llm, "prompt_of", list)
    monkeypatch.setattr(async_llm, "sampling_parameters", lambda request: None)
    engine = AsynchronousEngine(SETTINGS)
    engine._engine = vllm = AsyncLLM()

    async def run():
        calls = [asyncio.create_task(engine.sample([request()])) for _ in range(2)]
        await until(lambda: len(vllm.output_processor.request_states) == 2)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        assert vllm.aborted == ["0"]
        vllm.output_processor.add("orphan")
        left = await engine.end_orphans()
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return left, vllm.aborted, await engine.end_orphans()

    assert asyncio.run(run()) == (1, ["0", "orphan", "1"], 0)


class Engine:
    """Samples until `may_end`; vLLM keeps `orphans` requests for as often as it is asked to abort them, less one."""

    def __init__(self):
        self.may_end, self.orphans, self.slept = asyncio.Event(), 0, []
        self.open = 0

    async def sample(self, requests):
        self.open += len(requests)
        try:
            await self.may_end.wait()
        finally:
            self.open -= len(requests)
        return []

    async def end_orphans(self):
        return self.open + self.orphans

    async def sleep(self, level):
        self.slept.append(level)

    def tokens_made(self):
        return 0


@pytest.fixture
def generator(policy_model):
    """A generator whose engine is a stand-in."""
    it = Generator(policy_model, GenerationConfig(gpus=1, sleep_level=1), 5, 8, "generator/1")
    it._engine = Engine()
    it._receiver = SimpleNamespace(require_ready=lambda: None)
    return it


def test_open_requests_are_waited_for_and_then_named(generator, monkeypatch):
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    async def run():
        nonlocal now
        found = [await generator.open_requests(10)]
        calls = [asyncio.create_task(generator._sampled(generator._engine, [request(seed) for seed in seeds]))
                 for seeds in ([3], [4, 5, 6, 7])]
        await asyncio.sleep(0)
        now += 2.5
        found.append(await generator.open_requests(0.01))
        waiting = asyncio.create_task(generator.open_requests(10))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        generator._engine.may_end.set()
        await asyncio.gather(*calls)
        return [*found, await asyncio.wait_for(waiting, 1)]

    assert asyncio.run(run()) == [
        "", "1 request for 2.5 s (seed 3), 4 requests for 2.5 s (seed 4, 5, 6, ...)", ""]


def test_requests_that_vllm_does_not_abort_are_open_though_no_call_waits_for_them(generator):
    generator._engine.orphans = 2
    assert asyncio.run(generator.open_requests(0)) == (
        "2 requests of vLLM that no call waits for and that it does not abort")


def test_a_generator_with_open_requests_does_not_sleep(generator):
    async def run():
        call = asyncio.create_task(generator._sampled(generator._engine, [request(3)]))
        await asyncio.sleep(0)
        said = re.escape("generator/1 cannot sleep, because it has open requests: 1 request for 0.0 s (seed 3)")
        with pytest.raises(WorkerError, match=said):
            await generator.sleep()
        assert generator._engine.slept == []
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await generator.sleep()

    asyncio.run(run())
    assert generator._engine.slept == [1]
