"""Timing and results: without overlap none of the one in the other; with overlap nothing older than the bound."""

import gzip
import json
from contextlib import nullcontext

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL
from tests.cluster.delays import delayed_roles
from tests.cluster.resumed import CLOCKS, TRAFFIC, without

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def make_run(configure, directory, delayed=False, **sections):
    """Run the stage; returns its directory."""
    from rlhf_ray.stages import ppo

    with delayed_roles() if delayed else nullcontext():
        ppo.run(load(PPOConfig, configure(directory, **sections), []))
    return directory


def rows_of(directory):
    """Metrics without what a clock says."""
    return without(read_metrics(directory), *CLOCKS, TRAFFIC)


@pytest.fixture(scope="module")
def late(configure, tmp_path_factory):
    """The finished run once more, with late answers, and a profile of its second step."""
    directory = tmp_path_factory.mktemp("late") / "run"
    return make_run(configure, directory, delayed=True, logging={"profile_step": 2})


def test_without_overlap_neither_late_answers_nor_a_profile_change_a_bit(finished, late):
    assert rows_of(late) == rows_of(finished.directory)
    for name in ("model/model.safetensors", "model_ema/model.safetensors"):
        assert (late / name).read_bytes() == (finished.directory / name).read_bytes()
    state = json.loads((late / "checkpoints/step_4/coordinator.json").read_text())
    assert state == json.loads((finished.directory / "checkpoints/step_4/coordinator.json").read_text())


def test_a_profiled_step_leaves_traces_of_real_work_and_its_place_in_the_report(late):
    [step] = (late / "profile").iterdir()
    profile = json.loads((step / "profile.json").read_text())
    assert (step.name, profile["step"]) == ("step_2", 2)
    names = {f"{role}/{rank}" for role in ("generator", "policy_learner", "critic_learner") for rank in (0, 1)}
    assert set(profile["workers"]) == {*names, "reference_scorer/0"}
    for name, worker in profile["workers"].items():
        events = json.loads(gzip.decompress((step / worker["trace"]).read_bytes()))["traceEvents"]
        seen = {event["name"] for event in events}
        assert {operator["name"] for operator in worker["operators"]} <= seen, name
        assert any("linear" in each.lower() or "mm" in each for each in seen), name
    backward = [o["name"] for o in profile["workers"]["policy_learner/0"]["operators"] if "Backward" in o["name"]]
    assert backward, "the update is in it"
    assert {worker for worker, _, _ in profile["spans"]} >= {*names, "assembler/0", "reward_scorer/0"}
    report = (late / "report.html").read_text()
    assert '<svg class="timeline"' in report
    assert 'href="profile/step_2/policy_learner_1.trace.json.gz"' in report


def test_a_profile_has_rays_own_timeline_where_ray_keeps_a_record_of_calls(configure, tmp_path):
    logging = {"profile_step": 3, "task_events": True}
    run = make_run(configure, tmp_path / "run", **{**SMALL, "logging": logging})
    calls = json.loads((run / "profile/step_3/ray.trace.json").read_text())
    assert any("timed_call" in event["name"] for event in calls)


@pytest.fixture(scope="module")
def overlapped(configure, tmp_path_factory):
    """A run with late answers whose rollouts may be two versions old, and whose generators take few at a time."""
    sections = {**SMALL, "run": {"steps": 8}, "checkpoint": {"every": 0}, "generator": {"workers": 2},
                "coordinator": {"max_staleness": 2, "concurrency": 24}}
    return make_run(configure, tmp_path_factory.mktemp("overlap") / "run", delayed=True, **sections)


def test_with_late_answers_nothing_older_than_the_bound_is_trained(overlapped):
    staleness = [row["staleness/max"] for row in rows_of(overlapped) if "staleness/max" in row]
    assert len(staleness) == 8 and max(staleness) <= 2
    assert max(staleness) > 0, "work that does not overlap would be all zeros"


def test_every_sample_of_an_overlapped_run_was_made_once_and_trained(overlapped):
    ledger = json.loads((overlapped / "summary.json").read_text())["ledger"]
    print(ledger)
    assert ledger["attempts given up"] == 0
    assert ledger["committed"] == 8 * 16
