"""The in-process engine when vLLM fails in a step: no caller waits for it without end."""

import asyncio
import threading

import pytest

from rlhf_ray.errors import WorkerError
from tests.cluster.generators import KEYS, PROMPTS, VOCAB, make_generator
from tests.models import make_tiny_llama
from tests.threads import one_torch_thread

pytestmark = pytest.mark.slow
ENDS_S = 120.0
"""Within which calls end; a second, unless the machine is busy."""


def test_calls_made_while_a_step_fails_end_and_so_does_stop(tmp_path, monkeypatch):
    """Calls that arrive after the step began are in the queue when it fails."""
    from vllm.v1.engine.llm_engine import LLMEngine

    stepping, fail = threading.Event(), threading.Event()

    def failing_step(self):
        stepping.set()
        assert fail.wait(60)
        raise RuntimeError("no more memory")

    async def script():
        generator = make_generator(make_tiny_llama(tmp_path / "model", VOCAB))
        await generator.start()
        monkeypatch.setattr(LLMEngine, "step", failing_step)
        first = asyncio.create_task(generator.generate(PROMPTS, KEYS[:2], 3))
        while not stepping.is_set():
            await asyncio.sleep(0.01)
        later = asyncio.create_task(generator.generate(PROMPTS, KEYS[2:4], 3))
        await asyncio.sleep(0.1)
        stop = asyncio.create_task(generator.stop())
        await asyncio.sleep(0.1)
        fail.set()
        _, waiting = await asyncio.wait([first, later, stop], timeout=ENDS_S)
        assert not waiting, [name for name, task in (("first", first), ("later", later), ("stop", stop))
                             if task in waiting]
        for call in (first, later):
            with pytest.raises(WorkerError, match="failed in a step.*: RuntimeError: no more memory"):
                await call
        await stop
        with pytest.raises(WorkerError, match="is not running"):
            await generator.generate(PROMPTS, KEYS[:1], 3)

    with one_torch_thread():
        asyncio.run(asyncio.wait_for(script(), 280))
