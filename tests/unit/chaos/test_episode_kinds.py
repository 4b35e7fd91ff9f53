"""What counts as survived for faults in the middle of episodes, by the files of a stand-in for a run."""

import json

import pytest
import yaml

from chaos import invariants
from chaos.campaign import RUNS, Workspace
from chaos.kinds import KINDS
from chaos.outcomes import outcomes, to_inject_again
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from tests.unit.chaos.episode_outcomes import problems, row


@pytest.fixture
def run(fake_run):
    fake_run.start(0, 100, 0, 0)
    overlap(fake_run, 0)
    return fake_run


def overlap(run, max_staleness):
    run.record.config.write_text(f"coordinator: {{max_staleness: {max_staleness}}}")


def test_an_environment_that_failed_must_have_answered_the_same_turn_and_be_counted(run):
    number = run.injected("environment_kill", 10, step=2)
    row(run, 2, retries=1)
    row(run, 3, interrupted=0.0)
    assert problems(run) == ["no answer of the same turn afterwards"]
    run.line("recovered", 12, fault=number)
    assert problems(run) == ["no update counts any retries or interrupted or continued or restarted"]
    row(run, 4, interrupted=0.125)
    assert problems(run) == [""] and outcomes(run.record)[0].recovery_s == 2


def test_output_that_nobody_reads_needs_no_retry(run):
    run.line("recovered", 12, fault=run.injected("environment_flood", 10, step=2))
    assert problems(run) == [""]


def test_in_a_replay_two_processes_must_be_killed(run):
    number = run.injected("environment_kill_in_replay", 10, step=2)
    run.line("recovered", 12, fault=number)
    row(run, 3, retries=1)
    assert problems(run) == ["no process was killed in the replay"]
    run.line("confirmed", 11, fault=number, state="killed again in the replay")
    assert problems(run) == [""]


def test_a_late_episode_must_be_counted_as_such(run):
    run.line("recovered", 12, fault=run.injected("episode_late", 10, step=2))
    row(run, 3, retries=1)
    assert problems(run) == ["no update counts any cause/error_timeout"]
    row(run, 5, **{"cause/error_timeout": 0.1})
    assert problems(run) == [""]


@pytest.mark.parametrize("kind", ["runner_kill", "runner_stop", "runner_partition"])
def test_the_episodes_of_a_lost_runner_must_go_on(run, kind):
    number = run.injected(kind, 10, role="episode_runner", rank=1, pid=5, step=2)
    run.event("episode_runner", 5, 11, 3.0)
    run.line("recovered", 20, fault=number)
    row(run, 3, retries=1)
    assert problems(run)[0].startswith("no update counts an episode that went on")
    overlap(run, 1)
    assert problems(run) == [""], "it may have been too old when it ended"
    overlap(run, 0)
    row(run, 4, continued=0.5)
    assert problems(run) == [""]


def test_a_driver_that_is_killed_must_go_on_with_its_episodes(fake_run):
    fake_run.start(0, 20, -9, -9)
    fake_run.start(21, 100, 0, 0, "REINFORCE++: 3 episodes go on from their journals, after 7 turns")
    overlap(fake_run, 0)
    fake_run.injected("driver_kill_in_episodes", 20, step=2)
    fake_run.line("loop", 30)
    row(fake_run, 3, continued=0.0)
    assert problems(fake_run) == ["the resumed run continued no episode"]
    row(fake_run, 3, restarted=0.5)
    assert problems(fake_run) == [""]
    fake_run.record.starts[1].log.write_text("")
    assert problems(fake_run) == ["the resumed run continued no episode"]


def test_an_order_that_ended_with_its_driver_is_given_again(fake_run):
    fake_run.start(0, 20, -9, -9)
    number = fake_run.injected("environment_hang", 10, step=2)
    assert to_inject_again(fake_run.record) == {number}
    fake_run.line("recovered", 12, fault=number)
    assert to_inject_again(fake_run.record) == set()


def test_there_are_twelve_kinds_of_episodes_some_within_the_repair_of_another_fault():
    mine = {name: kind for name, kind in KINDS.items() if any(run in kind.runs for run, settings in RUNS.items()
                                                              if settings.episodes)}
    assert len({kind.triple for kind in mine.values()}) == len(mine) >= 12
    assert {name for name, kind in mine.items() if kind.preceded_by} == {"runner_kill_in_replay"}
    assert sum(kind.is_repaired for kind in mine.values()) >= 4, "another fault may come during their repair"


def test_a_journal_of_an_episode_that_is_left_is_named(tmp_path):
    assert list(invariants._journals(tmp_path)) == []
    (tmp_path / "episodes/1f").mkdir(parents=True)
    file = "episodes/1f/episode_runner-0.journal"
    (tmp_path / file).write_text("")
    assert list(invariants._journals(tmp_path)) == ["left behind: episodes/1f", f"left behind: {file}"]


@pytest.mark.parametrize("name", RUNS)
def test_the_configuration_of_every_run_is_accepted(workspace, name, capsys):
    settings = RUNS[name]
    config, _ = workspace.configure(name, 12, settings.max_staleness, settings.sections, settings.uploads,
                                    settings.episodes)
    loaded = load(PPOConfig, config, [])
    given = yaml.safe_load(config.read_text())
    assert bool(loaded.environments) is bool(settings.episodes) is ("critic" not in given)
    assert loaded.checkpoint.every == settings.saved_every and "no effect" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    class Service:
        url = "http://127.0.0.1:9999"

    return Workspace.make(tmp_path_factory.mktemp("runs") / "runs", Service())


@pytest.mark.parametrize("name, differs", [("episodes/continued", False), ("eval/interrupted", False),
                                           ("episodes/turns", True), ("eval/failed", True)])
def test_what_was_repaired_is_no_difference_from_the_undisturbed_run(run, tmp_path, monkeypatch, name, differs):
    monkeypatch.setattr(invariants, "samples", lambda directory: [])
    directories = [run.record.directory, tmp_path / "undisturbed"]
    for number, directory in enumerate(directories):
        directory.mkdir(exist_ok=True)
        (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, name: number}) + "\n")
    assert bool(list(invariants._differences(*directories))) is differs
