"""A whole run on three nodes, each with pools of its own, whose driver is on a fourth, and whose generators come and go
in the middle. At max_staleness 0 the result is that of a run on one node with two generators, to the bit."""

import asyncio
import io
import json
import shutil
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.live_status import worker_locations
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.observability.control_files import ask
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.nodes import METRICS, SMALL_RESULTS, cluster_of
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
POOLS = {"rollouts": "gen", "learners": "learn", "scorers": "score"}
"""Pool -> kind of node."""
PLACES = {"generator": {"pool": "rollouts"}, "policy": {"pool": "learners"}, "critic": {"pool": "learners"},
          "reference": {"pool": "scorers"}, "reward": {"pool": "scorers"}, "assembler": {"pool": "learners"}}


@dataclass
class Seen:
    """What was seen of a run while it went on."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    """To requests, in order."""
    workers: list[list[dict[str, Any]]] = field(default_factory=list)
    """The workers by node: at the first step, and after each request."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Ray's id of a node -> its kind."""
    received: list[dict[str, float]] = field(default_factory=list)
    """Bytes from other nodes by kind: when the loop began, and when it was over."""
    published: int = 0
    """Bytes of one publication."""
    output: str = ""
    resumed: str = ""
    """What the resumed run printed."""


async def busy(coordinator, step):
    """Wait until responses are generated after `step` updates."""
    clock = coordinator.roles.clock
    while coordinator.state.step != step or "generate" not in {task.phase for task in clock.under_way}:
        await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def scaled(configure, tmp_path_factory, finished, own_ray):
    """The run of `finished`, with a third generator asked for at step 1, and all but one sent away at step 3; then one
    step more, resumed."""
    from rlhf_ray.stages import ppo

    directory, seen, run = tmp_path_factory.mktemp("scaled") / "run", Seen(), Coordinator.run

    async def scale(coordinator, step, number):
        await busy(coordinator, step)
        seen.answers.append(await asyncio.to_thread(ask, directory, "scale", {"generators": number}, 200))
        seen.workers.append(worker_locations(coordinator.roles))

    async def run_and_scale(self):
        if self.config.run.steps > 4:
            return await run(self)
        seen.workers.append(worker_locations(self.roles))
        seen.kinds.update({node: kind for kind, node in nodes.ids().items()})
        await asyncio.sleep(2)
        seen.received.append(await asyncio.to_thread(nodes.received))
        step = self._step

        async def slow_step(*args):  # a run that is over before a generator has started would show nothing
            if self.state.step == 2:
                await adding
            await step(*args)

        self._step = slow_step
        adding = asyncio.create_task(scale(self, 1, 3))
        removing = asyncio.create_task(scale(self, 3, 1))
        await run(self)
        await removing
        await asyncio.sleep(2)
        seen.received.append(await asyncio.to_thread(nodes.received))
        seen.published = self.weights._plan.whole.nbytes
        return None

    sections = {**PLACES, "pools": {name: {"cpus": 0.2, "labels": {"kind": kind}} for name, kind in POOLS.items()}}
    sections["pools"] |= {"learners": {"cpus": 2, "labels": {"kind": "learn"}}, "default": {"cpus": 0.01}}
    output = io.StringIO()
    with (cluster_of("gen", "learn", "score", system={**METRICS, **SMALL_RESULTS}) as nodes,
          pytest.MonkeyPatch.context() as patch, redirect_stdout(output)):
        patch.setattr(Coordinator, "run", run_and_scale)
        cluster = {"address": nodes.address, "allow_open": True}
        ppo.run(load(PPOConfig, configure(directory, cluster=cluster, **sections), []))
        seen.output = output.getvalue()
        steps_of_five = {**sections, "run": {"steps": 5}}
        after = directory.with_name("after")
        shutil.copytree(directory, after)
        ppo.run(load(PPOConfig, configure(after, cluster=cluster, **steps_of_five), []), resume=True)
        seen.resumed = output.getvalue()[len(seen.output):]
    return directory, seen


def test_every_role_is_where_the_labels_of_its_pool_say_and_the_driver_is_elsewhere(scaled):
    _, seen = scaled
    kinds = {"generator": "gen", "reference_scorer": "score", "reward_scorer": "score"}
    assert {line["worker"].split("/")[0] for line in seen.workers[0]} >= {
        "generator", "policy_learner", "critic_learner", "assembler", "prompt_reader"}
    for line in (line for lines in seen.workers for line in lines):
        assert seen.kinds[line["node"]] == kinds.get(line["worker"].split("/")[0], "learn"), line


def test_generators_came_and_went_and_were_told_of(scaled):
    directory, seen = scaled
    assert [answer["generators"] for answer in seen.answers] == [[0, 1, 2], [0]]
    assert [answer["message"] for answer in seen.answers] == [
        "generators: 2 before, 3 now", "generators: 3 before, 1 now"]
    first, added, removed = ([w["worker"] for w in lines if w["worker"].startswith("generator")]
                             for lines in seen.workers)
    assert (first, added, removed) == (
        ["generator/0", "generator/1"], ["generator/0", "generator/1", "generator/2"], ["generator/0"])
    assert json.loads((directory / "generators.json").read_text()) == {"generators": 1, "configured": 2}
    assert "generator/2 added, with version" in seen.output
    assert not (directory / "faults.jsonl").exists(), "nobody was lost"


def test_the_one_that_was_added_made_samples_and_no_bit_of_the_result_changed(scaled, finished):
    directory, _ = scaled
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        assert audit(db, ended=True) == [] and counts(db)["attempts given up"] == 0
        assert "generator/2" in {str(worker) for (worker,) in db.execute("SELECT DISTINCT worker FROM samples")}
    for name in ("model/model.safetensors", "model_ema/model.safetensors"):
        assert (directory / name).read_bytes() == (finished.directory / name).read_bytes()
    rows = [without(steps(d), *CLOCKS, TRAFFIC) for d in (directory, finished.directory)]
    assert rows[0] == rows[1] and samples(directory) == samples(finished.directory)


def test_a_resumed_run_has_as_many_generators_as_were_left(scaled):
    _, seen = scaled
    assert "1 generators, as set by `rlhf-ray scale` (configured: 2)" in seen.resumed
    assert "1 generator," in seen.resumed


def test_weights_come_to_a_node_once_for_all_its_generators(scaled):
    _, seen = scaled
    before, after = seen.received
    per_step = {kind: (after[kind] - before[kind]) / 4 for kind in after}
    print(f"bytes a step by node {per_step}, a publication {seen.published}")
    # Two or three generators read each of 4 publications; one that was added got one more by itself.
    assert seen.published <= per_step["gen"] < 1.9 * seen.published
    assert per_step["score"] < seen.published and per_step["head"] < seen.published
