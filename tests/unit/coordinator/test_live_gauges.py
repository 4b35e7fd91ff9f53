"""What the live metrics say of a coordinator at a moment. Workers are stand-ins; buffer, state and clock are real."""

from types import SimpleNamespace

import pytest

from rlhf_ray.coordinator.live_gauges import WINDOW_S, LiveGauges, pools_of
from rlhf_ray.observability.prometheus import LIVE
from rlhf_ray.observability.spans import Task
from tests.unit.coordinator.harnesses import CoordinatorHarness


class Time:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def run(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=3), summary)
    run.coordinator.weights.confirmed = {}
    return run


def live_of(run, time):
    return LiveGauges({group.role: "default" for group in run.coordinator.roles.groups()}, time)


def read(live, run):
    return {(metric, *labels.values()): value for metric, value, labels in live.read(run.coordinator)}


def test_all_live_metrics_are_told_with_their_labels(run, time):
    told = live_of(run, time).read(run.coordinator)
    assert {value.metric: tuple(value.labels) for value in told} == {name: live.labels for name, live in LIVE.items()}


def test_it_says_who_is_busy_idle_and_down(run, time):
    coordinator, clock = run.coordinator, run.coordinator.roles.clock
    clock.now = lambda: 1000.0
    for phase in ("logprobs", "policy_update"):  # two calls of one worker
        clock.under_way.add(Task("policy", 1, phase, clock.now() - 5.0))
    live = live_of(run, time)
    coordinator.roles.health.down["critic", 0] = SimpleNamespace(recorded=False)
    coordinator.roles.health.down["critic", 1] = SimpleNamespace(recorded=True)
    clock.under_way.add(Task("critic", 0, "values", clock.now()))  # nobody has been told yet that it is lost
    now = read(live, run)
    assert [now["live/workers", "policy", "default", state] for state in ("busy", "idle", "down")] == [1, 1, 0]
    states = ("busy", "idle", "down", "missing")
    assert [now["live/workers", "critic", "default", state] for state in states] == [0, 0, 1, 1]
    assert now["live/oldest_call", "policy"] == 5.0 and now["live/oldest_call", "critic"] == 0.0
    whole = sum(coordinator.roles.workers().values())
    assert now["live/pool_busy", "default"] == pytest.approx(1 / whole)


def test_how_busy_a_pool_is_is_a_mean_of_the_last_minute(run, time):
    live = live_of(run, time)
    task = Task("policy", 0, "policy_update", 0.0)
    workers = sum(run.coordinator.roles.workers().values())
    run.coordinator.roles.clock.under_way.add(task)
    assert read(live, run)["live/pool_busy", "default"] == pytest.approx(1 / workers)
    run.coordinator.roles.clock.under_way.discard(task)
    time.now += 30
    assert read(live, run)["live/pool_busy", "default"] == pytest.approx(0.5 / workers)
    time.now += WINDOW_S
    assert read(live, run)["live/pool_busy", "default"] == 0.0


def test_the_age_of_a_step_begins_anew_with_each(run, time):
    live = live_of(run, time)
    time.now += 40
    assert read(live, run)["live/step_age",] == 0.0, "the run begins when it is first looked at"
    time.now += 20
    assert read(live, run)["live/step_age",] == 20.0
    run.coordinator.state.step += 1
    now = read(live, run)
    assert (now["live/step_age",], now["live/step",], now["live/steps",]) == (0.0, 1, 3)


def test_a_generator_that_did_not_confirm_is_behind(run, time):
    run.coordinator.state.step = 7
    run.coordinator.weights.confirmed = {rank: 7 - rank for rank in range(len(run.coordinator.roles.generators))}
    run.coordinator.roles.health.down["generators", 9] = SimpleNamespace(recorded=False)
    told = read(live_of(run, time), run)
    assert told["live/policy_version",] == 7
    behind = {key[1]: value for key, value in told.items() if key[0] == "live/versions_behind"}
    assert behind == {"generator/0": 0, "generator/1": 1, "generator/2": 2, "generator/9": 7}


def test_the_pools_of_a_configuration_are_those_that_its_roles_name(ppo_config):
    config = ppo_config(pools={"default": {"cpus": 4}, "b": {"cpus": 4}}, policy={"pool": "b"})
    pools = pools_of(config)
    assert (pools["generator"], pools["policy_learner"]) == ("default", "b")


def test_a_generator_that_was_removed_is_behind_nobody(run, time):
    live, roles = live_of(run, time), run.coordinator.roles
    run.coordinator.state.step = 3
    assert read(live, run)["live/versions_behind", "generator/0"] == 3
    roles.dispatcher(roles.generators).scheduler.leave_out(0)
    assert read(live, run)["live/versions_behind", "generator/0"] == 0
