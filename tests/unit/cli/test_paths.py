"""Paths among the arguments of commands are expanded, or refused."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.cli.paths import local_path, path_or_name
from rlhf_ray.errors import ConfigError

NO_PATHS = {
    "prompt", "step", "stop", "column", "address", "job", "nodes", "cluster", "stage", "env", "host", "dtype",
    "revision",
    "label", "name", "arguments", "tls_cert", "tls_key", "tokenizer", "shape", "skip", "cause",
    "push_to_hub",
}
"""Parameters with text that are no path, or whose command expands them as the configuration does."""


def parameters():
    """Each parameter with text or a path of each command."""
    group = typer.main.get_command(app)
    commands = [(name, command) for name, command in group.commands.items()]
    commands += [(f"{name} {inner}", command) for name, group in commands for inner, command
                 in getattr(group, "commands", {}).items()]
    return [pytest.param(parameter, id=f"{name} {parameter.name}") for name, command in commands
            for parameter in command.params
            if parameter.name != "help" and parameter.type_descriptor.annotation in (str, Path, list[str])]


@pytest.mark.parametrize("parameter", parameters())
def test_every_parameter_that_is_a_path_is_expanded(parameter):
    parser = parameter.type_descriptor.parameter_info.parser
    assert (parser in (local_path, path_or_name)) != (parameter.name in NO_PATHS)


@pytest.mark.parametrize("arguments", [
    ["status", "~/RUN"], ["report", "$HOME/RUN"], ["ledger", "~/RUN"], ["profile", "~/RUN"],
    ["samples", "~/RUN"],
    ["scale", "~/RUN", "--generators", "1"], ["generate", "~/RUN", "--prompt", "a"], ["ppo", "~/RUN"],
    ["check-model", "~/RUN"], ["serve-reward", "~/RUN"], ["data", "inspect", "~/RUN.jsonl", "--model", "m"],
    ["compare", "~/RUN", "b", "--prompts", "p", "--scorer", "vader"], ["plan", "${HOME}/RUN"], ["submit", "~/RUN"],
    ["export", "~/RUN"],
    ["serve-reward", "m", "--token-file", "~/RUN"],
])
def test_the_home_directory_is_that_of_the_user(tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert f"{tmp_path}/RUN" in str(result.exception)


@pytest.mark.parametrize("arguments", [
    ["status", "~no-such-user/x"], ["ppo", "~no-such-user/x"], ["quickstart", "--dir", "~no-such-user/x"],
    ["data", "inspect", "x", "--model", "m", "--unusable", "~no-such-user/x"], ["generate", "~no-such-user/x"],
    ["submit", "x.yaml", "--requirements", "~no-such-user/x"], ["plan", "--shape", "m=~no-such-user/x", "CONFIG"],
])
def test_an_unknown_home_directory_is_refused(tmp_path, arguments):
    config = tmp_path / "sft.yaml"
    config.write_text("model: {path: m}\ndata: {path: d}\n")
    result = CliRunner().invoke(app, [str(config) if each == "CONFIG" else each for each in arguments])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("the argument '~no-such-user/x' begins with ~no-such-user, which is no")


@pytest.mark.parametrize(("option", "named"), [
    ("--run.dir=~/x", "run.dir='~/x'"), ("--model.path=$HOME/m", "model.path='$HOME/m'"),
])
def test_a_job_does_not_get_a_path_that_means_another_place_there(tmp_path, option, named):
    config = tmp_path / "sft.yaml"
    config.write_text("model: {path: m}\ndata: {path: d}\nrun: {dir: /shared/x}\n")
    result = CliRunner().invoke(app, ["submit", str(config), option])
    assert str(result.exception).startswith(f"{named} depends on this machine's environment")
