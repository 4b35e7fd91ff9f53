"""One step's row, worked out by hand."""

import numpy as np
import pytest

from rlhf_ray.coordinator.step_metrics import StepOutcome, step_metrics
from rlhf_ray.coordinator.weight_sync import Published
from rlhf_ray.observability.spans import StepClock, Task
from rlhf_ray.records import SampleKey, UpdateStats
from rlhf_ray.replay.chunk import BufferStats

BUFFER = BufferStats(samples_ready=6, samples_reserved=0, samples_leased=0, bytes=3 * 2**20)
PUBLISHED = Published(seconds=0.4, pause_seconds=0.1, nbytes=5 * 2**19)
WORKERS = {"generator": 2, "critic_learner": 1}
SECTIONS = ("generator", "reward", "assembler", "policy", "critic")
PHASES = ("generate", "reference", "reward", "logprobs", "values", "assemble", "policy_update", "critic_update",
          "publish")


def stats(**metrics):
    return UpdateStats(step=5, applied=4, skipped=0, seconds=1.0, tokens=10, metrics=metrics)

FAULTS = {"faults/lost_workers": 2.0}


@pytest.fixture
def clock():
    """Within the window from 100 to 110 s: one of two generators busy for 6 s, the critic for 2 s."""
    it = StepClock()
    for role in ("generator", "phase:generate"):
        it.add(role, 98.0, 103.0, 0)
        it.add(role, 104.0, 107.0, 0)
    for role in ("critic_learner", "phase:critic_update"):
        it.add(role, 108.0, 110.0)
    return it


@pytest.fixture
def row(summary, clock):
    """row(policy): the metrics of a step that trained version 5 on three samples of versions 5 and 4."""

    def build(policy=None, **columns):
        first = summary([SampleKey(0, 0, 0), SampleKey(0, 1, 0)], version=5, **columns)
        second = summary([SampleKey(0, 2, 0)], version=4, scores=np.array([5.0], dtype=np.float32),
                         kl=np.array([2.0], dtype=np.float32), response_lengths=np.array([10], dtype=np.int32),
                         finished=np.array([False]), behaviour_gap=0.75, tokens=12,
                         gold=columns.get("gold") if "gold" not in columns else columns["gold"][:1])
        critic = stats(loss=2.0, explained_variance=0.5)
        outcome = StepOutcome([first, second], policy, critic, 5, 0.07, PUBLISHED, 1500, FAULTS,
                              began=100.0, ended=110.0)
        return step_metrics(outcome, BUFFER, clock, WORKERS, SECTIONS)

    return build


def test_lost_workers_are_told(row):
    assert row()["faults/lost_workers"] == 2.0


def test_numbers_about_the_samples(row):
    found = row()
    assert found["reward/mean"] == 2.0  # 0, 1 and 5
    assert found["reward/std"] == pytest.approx((14 / 3) ** 0.5)
    assert found["kl/sequence"] == 1.0  # 0.5, 0.5 and 2
    assert found["response/length"] == 6.0 and found["response/finished"] == pytest.approx(2 / 3)
    assert found["rollout/logprob_gap"] == pytest.approx((8 * 0.25 + 10 * 0.75) / 18)  # by tokens
    assert found["rollout/logprob_gap_p99"] == pytest.approx(0.1 * 10**0.1)
    assert (found["staleness/max"], found["staleness/mean"]) == (1.0, 0.5)


def test_the_gap_is_the_update_s_where_that_measured_it(row):
    found = row(stats(logprob_gap=0.125, logprob_gap_p99=0.5))
    assert (found["rollout/logprob_gap"], found["rollout/logprob_gap_p99"]) == (0.125, 0.5)
    assert not [name for name in found if name.startswith("policy/logprob_gap")]


def test_failed_tries_are_counted_by_kind(row):
    found = row(failures={"far": 1, "far/timeout": 2, "far/http_503": 1})
    assert {name: n for name, n in found.items() if "failed_tries" in name} == {
        "reward/failed_tries/far/timeout": 2, "reward/failed_tries/far/http_503": 1}


def test_numbers_about_the_step(row):
    found = row()
    assert found["coordinator/bytes_per_sample"] == 500.0  # 1500 bytes for three samples
    assert (found["kl/coef"], found["weights/publish_seconds"], found["weights/version"]) == (0.07, 0.4, 6.0)
    assert (found["weights/pause_seconds"], found["weights/published_mb"]) == (0.1, 2.5)
    assert (found["buffer/samples"], found["buffer/mb"]) == (6.0, 3.0)
    assert found["throughput/samples_per_second"] == pytest.approx(0.3)
    assert found["throughput/tokens_per_second"] == pytest.approx(2.4)  # 12 + 12 tokens in 10 s
    assert found["time/step"] == 10.0


def test_phase_times(row):
    found = row()
    phases = {name.removeprefix("time/"): found[name] for name in found if name.startswith("time/")}
    assert phases.pop("step") == 10.0
    assert phases == pytest.approx({**dict.fromkeys(PHASES, 0.0), "generate": 6.0, "critic_update": 2.0})


def test_the_policy_is_absent_while_the_critic_warms_up(row):
    found = row()
    assert (found["critic/loss"], found["critic/explained_variance"]) == (2.0, 0.5)
    assert not [name for name in found if name.startswith("policy/")]
    assert row(policy=stats(loss=-0.5))["policy/loss"] == -0.5


def test_the_judges_mean_appears_with_a_judge(row):
    assert "reward/gold" not in row()
    gold = np.array([0.5, -0.25], dtype=np.float32)
    assert row(gold=gold)["reward/gold"] == pytest.approx(0.25)  # 0.5, -0.25 and 0.5


def test_shares_of_time_say_who_waited_for_whom(row, clock):
    clock.under_way.add(Task("generator", 1, "generate", 109.0))  # not over when the step ends
    found = row()
    assert found["share/generator/busy"] == pytest.approx(7 / 20)
    assert found["share/generator/generator"] == pytest.approx(6 / 20)
    assert found["share/critic_learner/generator"] == pytest.approx(0.6)
    assert found["share/critic_learner/busy"] == pytest.approx(0.2)
    assert found["share/critic_learner/coordinator"] == pytest.approx(0.2)


def test_components_of_the_reward_one_by_one(summary, clock):
    def chunk(row, quality, length, failures):
        return summary([SampleKey(0, row, 0), SampleKey(0, row, 1)], components={
            "quality": np.array(quality, dtype=np.float32), "length": np.array(length, dtype=np.float32),
        }, failures={"quality": 0, "length": failures})

    chunks = [chunk(0, [1, 3], [0, 0], 1), chunk(1, [5, 7], [2, 2], 0)]
    outcome = StepOutcome(chunks, None, stats(loss=2.0), 0, 0.07, PUBLISHED, 1500, FAULTS, began=100.0, ended=110.0)
    found = step_metrics(outcome, BUFFER, clock, WORKERS, SECTIONS)
    assert (found["reward/component/quality"], found["reward/component/length"]) == (4.0, 1.0)
    assert (found["reward/component/quality/std"], found["reward/component/length/std"]) == (pytest.approx(5**0.5), 1.0)
    assert (found["reward/failures/quality"], found["reward/failures/length"]) == (0.0, 0.25)
