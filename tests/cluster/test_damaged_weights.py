"""Buckets of weights whose bytes change between learner and generator: sent again, or the generator is replaced."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.records import WeightBucket
from rlhf_ray.roles.generator import Generator
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without
from tests.roles_in_runs import use_class

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PLAN = {("generator/0", 1): 1, ("generator/1", 2): 2}
"""How many buckets are damaged on their way to a generator, by its name and the version."""


def damaged_on_the_way(counts: Path) -> type[Generator]:
    """A generator whose buckets are damaged according to the plan; `counts` gets a file for each."""
    class DamagedOnTheWay(Generator):
        async def load_weights(self, bucket: Any, publication: int) -> None:
            assert isinstance(bucket, WeightBucket)
            place = f"{self.name.replace('/', '_')}_{bucket.version}"
            before = len(list(counts.glob(f"{place}_*")))
            if bucket.index == 0 and before < PLAN.get((self.name, bucket.version), 0):
                (counts / f"{place}_{before}").touch()
                last = bucket.arrays[-1].copy()
                last[-1] ^= 1
                bucket = replace(bucket, arrays=[*bucket.arrays[:-1], last])
            await super().load_weights(bucket, publication)

    return DamagedOnTheWay


def test_damaged_buckets_are_sent_again_and_a_generator_that_gets_one_twice_is_replaced(
        configure, tmp_path, finished, monkeypatch):
    from rlhf_ray.stages import ppo

    counts = tmp_path / "damaged"
    counts.mkdir()
    use_class(monkeypatch, damaged_on_the_way(counts))
    ppo.run(load(PPOConfig, configure(tmp_path / "run"), []))
    assert sorted(file.name for file in counts.iterdir()) == ["generator_0_1_0", "generator_1_2_0", "generator_1_2_1"]
    events = [(event["rank"], event["kind"]) for event in read_faults(tmp_path / "run/faults.jsonl")]
    assert events == [(0, "damaged"), (1, "damaged"), (1, "broke")]
    assert sum(row["faults/damaged_buckets"] for row in steps(tmp_path / "run")) == 2
    one, other = (directory / "model/model.safetensors" for directory in (tmp_path / "run", finished.directory))
    assert one.read_bytes() == other.read_bytes()
    one, other = ([without([row], *CLOCKS, TRAFFIC) for row in steps(directory)]
                  for directory in (tmp_path / "run", finished.directory))
    assert one == other and samples(tmp_path / "run") == samples(finished.directory)
