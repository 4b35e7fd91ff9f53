"""Prompts are opened again after a loss of their reader: the same rows, or an error that names what changed."""

import asyncio
import json
import time

import pytest

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.rollout_source import PromptSource, reopened
from rlhf_ray.errors import CheckpointError
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.roles.data_readers import PromptReader
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from tests.models import make_tiny_tokenizer
from tests.unit.coordinator.stand_ins import StandInGroup


class Answer:
    def __init__(self, result):
        self.result = result

    async def value(self):
        return self.result


class LocalReaders:
    """A worker group whose one worker is an object of this process."""

    def __init__(self, reader):
        self.reader = reader

    def call(self, rank, method, *arguments):
        return Answer(method(self.reader, *arguments))


def test_a_table_that_is_opened_again_has_the_rows_of_before(tmp_path):
    make_tiny_tokenizer(tmp_path / "m", 16)
    reader = PromptReader(ModelConfig(path=str(tmp_path / "m")))
    reader.start()
    path = tmp_path / "p.jsonl"

    def write(*prompts):
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    write("w2 w3", "w4")
    config, ready = PromptsConfig(path=str(path)), []
    began = {"training": reader.open("training", config)["contents"]}
    open_again = reopened(LocalReaders(reader), {"training": config}, began)
    asyncio.run(open_again(0, lambda: ready.append(True)))
    write("w2 w3", "w5")
    with pytest.raises(CheckpointError, match=r"the rows of .*p\.jsonl are not those that the run began with"):
        asyncio.run(open_again(0, lambda: ready.append(True)))
    assert ready == [True]


def test_a_reader_that_reads_for_long_is_watched():
    """Its heartbeats show whether it was stopped; otherwise only the deadline of the call would."""
    async def forever(*_):
        await asyncio.Event().wait()

    async def watched():
        later_s = 0.0
        health = HealthMonitor(ClusterConfig(), clock=StepClock(lambda: time.monotonic() + later_s))
        reader = WorkerDispatcher(StandInGroup("prompt_reader", forever), health)
        health.register(reader.scheduler)
        reading = asyncio.create_task(PromptSource(reader, "training", [5], []).read([1, 2]))
        await asyncio.sleep(0.01)
        later_s = ClusterConfig().heartbeat_timeout_s
        found = [(group.role, rank) for group, rank in health.watched()]
        reading.cancel()
        return found

    assert asyncio.run(watched()) == [("prompt_reader", 0)]
