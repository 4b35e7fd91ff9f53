"""The benchmark of overlap: how sides are balanced, what a turn says, which turns may be compared."""

import pytest

from benchmarks.async_speedup import balance, figure, require_same_work
from benchmarks.comparison import DifferentWork
from benchmarks.overlap_run import Steps, Watch, run_config
from rlhf_ray.observability.spans import StepClock


def steps(step=2.0, update=1.0, forward=0.2, tokens=100.0, idle=0.1):
    """Two equal steps of 128 samples each."""
    row = {"time/step": step, "time/policy_update": update, "time/logprobs": forward, "staleness/max": 1.0,
           "throughput/tokens_per_second": tokens / step, "weights/publish_seconds": 0.03}
    return Steps([row, row], {"generation": idle, "learning": idle / 2}, samples_each=128)


@pytest.fixture
def config(tmp_path):
    return run_config(tmp_path, algorithm={"epochs": 2})


@pytest.mark.parametrize(("generation", "learning", "settings"), [
    (1.0, 1.1, {}),
    (1.0, 0.95, {}),
    (2.2, 1.2, {"algorithm": {"epochs": 4, "mini_batches": 4}}),  # 0.5 s an epoch beside 0.2 s of forward passes
    (1.5, 1.2, {"algorithm": {"epochs": 2, "mini_batches": 8}}),  # 0.58 s an epoch of eight steps
    (1.0, 2.2, {"algorithm": {"epochs": 1, "mini_batches": 4}, "generator": {"max_sequences": 53}}),
])
def test_epochs_and_mini_batches_or_else_the_generator_s_batch_balance_the_sides(
    config, generation, learning, settings
):
    measured = steps(step=4.0, forward=0.2)
    measured.idle.update(generation=1 - generation / 4.0, learning=1 - learning / 4.0)
    assert balance(config, measured) == settings


def test_the_figure_is_the_median_of_the_pairs_and_tells_the_idle_shares(config):
    found = figure(config, [steps(step=2.0), steps(step=2.0), steps(step=2.0)],
                   [steps(step=1.0, idle=0.1), steps(step=1.25, idle=0.2), steps(step=1.6, idle=0.3)])
    assert found.repeats == pytest.approx([2.0, 1.6, 1.25]) and found.value == pytest.approx(1.6)
    assert found.reached and (found.ours, found.theirs) == pytest.approx((128 / 1.25, 64))
    assert found.more["idle_share"] == pytest.approx({"generation": 0.2, "learning": 0.1})


def test_turns_of_other_tokens_are_not_compared():
    require_same_work([steps(tokens=100), steps(tokens=101)])
    with pytest.raises(DifferentWork, match=r"trained on \[200, 210\] tokens"):
        require_same_work([steps(tokens=100), steps(tokens=105)])


def test_a_side_is_idle_when_none_of_its_roles_works():
    clock = StepClock(lambda: 110.0)
    clock.add("generator", 95.0, 103.0)
    clock.add("reference_scorer", 102.0, 106.0)
    clock.add("policy_learner", 104.0, 112.0)
    watch = Watch(clock)
    for _ in range(3):
        watch.write(1, {"time/step": 10.0})
    middle = watch.middle(128)
    assert len(middle.rows) == 1, "the first and the last step of a turn do not count"
    assert middle.idle == pytest.approx({"generation": 0.4, "learning": 0.4})
