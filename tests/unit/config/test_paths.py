"""Every path that a user gives is expanded, wherever it is given, or refused."""

import re
from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from rlhf_ray.config.fields import section_of_items, sections_of, sections_of_values
from rlhf_ray.config.load import STAGES, load
from rlhf_ray.config.paths import expand_path
from rlhf_ray.config.scorer_names import scorer_rewards
from rlhf_ray.config.serving import ServingConfig
from rlhf_ray.errors import ConfigError

NOBODY = "~no-such-user/x"
NO_PATHS = {
    "address", "trackers", "project", "run_name", "tags", "revision", "subset", "split", "system", "text",
    "prompt", "response", "messages", "column", "chosen", "rejected", "margin", "steps", "labels", "pool", "targets",
    "best_metric", "stop", "placeholder", "good", "bad", "separator", "label", "urls", "columns", "token_variable",
    "allow_hosts", "answer", "after", "pattern", "group", "host", "derived", "tool_format",
    "tests", "run", "variables", "gateway_host", "actions", "id", "command", "reset_tool", "reward_tool", "tools",
    "url", "field", "observation", "task",
}
"""Fields with text that names no file. One that is new belongs here, or has the type `UserPath`."""


def sections(cls: type[BaseModel]) -> set[type[BaseModel]]:
    """A section with all sections within it."""
    found = {cls}
    for field in cls.model_fields.values():
        item = section_of_items(field.annotation)
        below = (*sections_of(field.annotation), *sections_of_values(field.annotation), *((item,) if item else ()))
        found |= {each for section in below for each in sections(section)}
    return found


def takes_text(annotation) -> bool:
    """Whether a field holds text; the keys of a mapping are names."""
    members = get_args(annotation)
    return annotation is str or any(map(takes_text, members[1:] if get_origin(annotation) is dict else members))


def refused(section: type[BaseModel], name: str) -> bool:
    """Whether a field refuses a path below the home of a user who does not exist."""
    try:
        section.model_validate({name: NOBODY})
    except ValidationError as error:
        return any(each["loc"][0] == name and "no user's home" in each["msg"] for each in error.errors() if each["loc"])
    return False


FIELDS = sorted({(section, name) for cls in (*STAGES.values(), ServingConfig) for section in sections(cls)
                 for name, field in section.model_fields.items() if takes_text(field.annotation)},
                key=lambda pair: (pair[0].__name__, pair[1]))


@pytest.mark.parametrize(("section", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_that_is_a_path_is_expanded(section, name):
    assert refused(section, name) != (name in NO_PATHS)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("EMPTY", "")
    return tmp_path


@pytest.mark.parametrize(("given", "expanded"), [
    ("~/runs/x", "HOME/runs/x"), ("~", "HOME"), ("~root/x", "/root/x"), ("$SCRATCH/x", "/scratch/me/x"),
    ("${SCRATCH}/x", "/scratch/me/x"), ("~/rewards.py:score", "HOME/rewards.py:score"),
    ("file://~/copies", "file://HOME/copies"), ("s3://bucket/$USER_OF_TEST/x", "s3://bucket/me/x"),
    ("~/data/[a]*.jsonl", "HOME/data/[a]*.jsonl"),
    # unchanged
    ("runs/x", "runs/x"), ("../x", "../x"), ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"), ("a~/b", "a~/b"),
    ("./~/x", "./~/x"), ("s3://bucket/~/x", "s3://bucket/~/x"), ("http://host:1/~me", "http://host:1/~me"),
    ("part$.jsonl", "part$.jsonl"), ("5$", "5$"), ("my.rewards:score", "my.rewards:score"),
])
def test_what_a_path_becomes(home, monkeypatch, given, expanded):
    monkeypatch.setenv("USER_OF_TEST", "me")
    assert expand_path(given) == expanded.replace("HOME", str(home))


@pytest.mark.parametrize(("given", "named"), [
    (NOBODY, "begins with ~no-such-user,"), ("file://~no-such-user/x", "begins with ~no-such-user,"),
    ("~no-such-user", "begins with ~no-such-user,"), ("$NO_SUCH/x", r"contains \$NO_SUCH,"),
    ("/a/${NO_SUCH}/x", r"contains \$\{NO_SUCH\},"), ("$SCRATCH/$NO_SUCH", r"contains \$NO_SUCH,"),
    ("$EMPTY/x", r"contains \$EMPTY,"),
])
def test_an_unknown_user_or_variable_is_refused(home, given, named):
    with pytest.raises(ValueError, match=f"{re.escape(repr(given))} {named}"):
        expand_path(given)


@pytest.mark.parametrize(("given", "said"), [
    ("d" * 300, r"'d{60}\.\.\.' has 300 bytes, 300 of them in one name, and Linux allows 4095 and 255"),
    ("runs/" + "é" * 128, "has 261 bytes, 256 of them in one name"),
    ("d/" * 2100 + "x", "has 4201 bytes, 1 of them in"),
    ("", "is no path"), ("a\0b", "is no path"),
])
def test_what_no_file_can_be_called_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        expand_path(given)
    expand_path("d" * 255 + "/" + "e" * 255)
    expand_path("s3://bucket/" + "d" * 300)


@pytest.mark.parametrize("source", ["file", "environment", "command line"])
def test_each_source_of_a_configuration(home, monkeypatch, tmp_path, source):
    path, overrides, run = tmp_path / "sft.yaml", [], {}
    if source == "file":
        run = {"run": {"dir": "~/runs/x"}}
    elif source == "environment":
        monkeypatch.setenv("RLHF_RAY_RUN__DIR", "~/runs/x")
    else:
        overrides = ["--run.dir=~/runs/x"]
    path.write_text(yaml.safe_dump({"model": {"path": "model"}, "data": {"path": "~/rows.jsonl"}, **run}))
    config = load(STAGES["sft"], "~/sft.yaml", overrides)
    assert config.run.dir == str(home / "runs/x") and config.data.path == str(home / "rows.jsonl")


def test_the_error_names_the_field_and_its_origin(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("model: {path: m}\ndata:\n  mix:\n    - path: ~no-such-user/x\n    - path: rows.jsonl\n")
    with pytest.raises(ConfigError, match=r"data\.mix\.0\.path: '~no-such-user/x' begins with .*sft.yaml:"):
        load(STAGES["sft"], path, [])


def test_scorers_and_what_their_files_hold(home):
    (home / "scorer.yaml").write_text("rewards: {a: {type: model, path: ~/rm}}\n")
    assert scorer_rewards("~/scorer.yaml")["a"].path == str(home / "rm")
    assert scorer_rewards("~/rm")["model"].path == str(home / "rm")
    assert scorer_rewards("~/f.py:score")["function"].function == f"{home}/f.py:score"
    with pytest.raises(ConfigError, match="--reward: '~no-such-user/x' begins with"):
        scorer_rewards(NOBODY, "--reward")


def test_no_other_place_expands_a_path():
    root = Path(__file__).parents[3] / "rlhf_ray"
    places = [str(file.relative_to(root)) for file in sorted(root.rglob("*.py"))
              if re.search(r"\bexpanduser|\bexpandvars", file.read_text())]
    assert places == ["cluster/jobs/submission_client.py", "config/paths.py"], "the first is a path of Ray's own"
