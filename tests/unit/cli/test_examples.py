"""`rlhf-ray example`: which stage module it hands over to, and with what."""

from pathlib import Path


def test_an_example_runs_in_a_directory_of_its_own_name(command_line, stage):
    calls = stage("arithmetic_example")
    assert command_line("example", "arithmetic").code == 0
    assert calls == [((Path("runs/arithmetic"), "grpo", 0, []), {})]


def test_options_and_overrides_are_passed_on(command_line, stage):
    calls = stage("arithmetic_example")
    outcome = command_line("example", "arithmetic", "--estimator", "rloo", "--dir", "/d", "--seed", "3",
                           "--run.steps=2")
    assert outcome.code == 0, outcome.err
    assert calls == [((Path("/d"), "rloo", 3, ["--run.steps=2"]), {})]


def test_the_tools_example_runs_in_its_own(command_line, stage):
    calls = stage("tools_example")
    assert command_line("example", "tools", "--run.steps=2").code == 0
    assert calls == [((Path("runs/tools"), "grpo", 0, ["--run.steps=2"]), {})]


def test_the_tools_example_may_be_played_by_an_agent_and_no_other(command_line, stage):
    calls = stage("tools_example")
    assert command_line("example", "tools", "--agent").code == 0
    assert calls == [((Path("runs/tools"), "grpo", 0, []), {"agent": True})]
    calls = stage("arithmetic_example")
    outcome = command_line("example", "arithmetic", "--agent")
    assert outcome.code == 2 and "arithmetic has no --agent" in outcome.err and not calls


def test_an_unknown_example_is_refused_with_those_there_are(command_line, stage):
    calls = stage("arithmetic_example")
    outcome = command_line("example", "poetry")
    assert outcome.code == 2 and "arithmetic" in outcome.err and not calls


def test_a_stray_argument_is_refused(command_line, stage):
    calls = stage("arithmetic_example")
    outcome = command_line("example", "arithmetic", "c.yaml")
    assert outcome.code == 2 and "unexpected argument 'c.yaml'" in outcome.err and not calls
