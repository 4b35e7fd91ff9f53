"""Help teaches: sections, the most used fields with defaults, an example; and every field when asked."""

from pathlib import Path

import pytest

from rlhf_ray.cli.config_help import COMMON
from rlhf_ray.config.fields import describe_fields
from rlhf_ray.config.load import COMMANDS, load
from rlhf_ray.config.stages import TRAINING

CHECKOUT = Path(__file__).parents[3]


def used(command: str, section: str) -> bool:
    """Whether a command has the section: an evaluation makes no updates."""
    return command != "evaluate" or section not in TRAINING


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_command_is_listed(command_line):
    shown = command_line("--help").out
    for command in ("quickstart", "example", "sft", "reward-model", "process-reward", "preferences", "ppo", "grpo",
                    "rloo", "reinforce", "evaluate", "report", "doctor"):
        assert f"│ {command} " in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stages_help_shows_sections_fields_and_an_example(command, command_line):
    outcome = command_line(command, "--help")
    assert outcome.code == 0
    for section in COMMANDS[command].model_fields:
        assert (f"\n  {section} " in outcome.out) == used(command, section)
    fields = {f.path: f for f in describe_fields(COMMANDS[command])}
    for path in COMMON[command]:
        assert f"--{path}  {'required' if fields[path].required else fields[path].default}" in outcome.out
        assert fields[path].sentence in words(outcome.out)
    assert f"rlhf-ray {command} configs/" in outcome.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_lists_every_field(command, command_line):
    outcome = command_line(command, "--help-all")
    assert outcome.code == 0
    for f in describe_fields(COMMANDS[command]):
        assert (f"--{f.path}  " in outcome.out) == used(command, f.section)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_is_one_that_works(command):
    from rlhf_ray.cli.config_help import _EXAMPLES

    program, name, file, *overrides = _EXAMPLES[command].split()
    assert (program, name) == ("rlhf-ray", command) and overrides
    stage = "ppo" if command in ("grpo", "rloo", "reinforce") else command
    changed = load(COMMANDS[command], CHECKOUT / file, overrides)
    file_alone = load(COMMANDS[stage], CHECKOUT / file, [])
    assert changed.model_dump() != file_alone.model_dump()


def test_the_version_is_printed(command_line):
    from importlib.metadata import version

    result = command_line("--version")
    assert (result.code, result.out.strip()) == (0, f"rlhf-ray {version('rlhf-ray')}")


def test_preferences_say_what_resuming_means_without_checkpoints(command_line):
    shown = words(command_line("preferences", "--help").out.replace("│", " "))
    assert "newest checkpoint" not in shown and "Keep what a finished run left in run.dir" in shown
    assert "Go on from the newest checkpoint" in words(command_line("ppo", "--help").out.replace("│", " "))


def test_what_ppo_is_most_often_tuned_by_is_shown():
    assert {"algorithm.estimator", "coordinator.samples_per_prompt"} <= set(COMMON["ppo"])


@pytest.mark.parametrize("command", COMMANDS)
def test_sentences_name_sections_and_no_classes(command):
    assert not [f.path for f in describe_fields(COMMANDS[command]) if "Config`" in f.sentence]
