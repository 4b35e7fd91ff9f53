"""Objects in a configuration become files in the run's directory, and a resume needs the same call."""

import hashlib
import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlhf_ray
from rlhf_ray.cli.main import app
from rlhf_ray.config.fields import strings_of
from rlhf_ray.config.given_objects import GivenFunction, GivenRows
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages.inputs import with_inputs

ROWS = [{"prompt": "w2", "answer": 1}, {"prompt": "w3", "answer": 2}]


def brief(responses, **_):
    return [float(-len(response)) for response in responses]


def longer(responses, **_):
    return [float(len(response)) for response in responses]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """config(function=brief, **sections): a run in ./run with a function and rows."""
    monkeypatch.chdir(tmp_path)

    def build(function=brief, prompts=ROWS, **sections):
        return PPOConfig(run={"dir": "run"}, model={"path": "m"}, prompts=prompts,
                         rewards={"r": {"type": "function", "function": function, "weight": 2}}, **sections)

    return build


def record():
    return json.loads(Path("run/inputs/inputs.json").read_text())["inputs"]


def test_objects_become_files_and_all_else_stays(config):
    given = config(prompts={"path": ROWS, "max_tokens": 7}, evaluation={"prompts": ROWS[:1]})
    found = with_inputs(given, resume=False)
    assert not [text for _, text in strings_of(found) if isinstance(text, GivenRows | GivenFunction)]
    assert Path(found.prompts.path).read_text() == "".join(json.dumps(row) + "\n" for row in ROWS)
    file, name = found.rewards["r"].function.split(":")
    assert name == "brief" and Path(file).parent == Path("run/inputs") and "def brief(" in Path(file).read_text()
    assert found.rewards["r"].weight == 2 and found.prompts.max_tokens == 7 and found.prompts.shuffle
    assert found.prompts.model_fields_set == {"path", "max_tokens"}
    assert Path(found.evaluation.prompts).read_text().count("\n") == 1
    assert sorted(each["field"] for each in record()) == ["evaluation.prompts", "prompts.path", "rewards.r.function"]
    for each in record():
        assert hashlib.sha256((Path("run/inputs") / each["file"]).read_bytes()).hexdigest() == each["sha256"]


def test_every_data_set_of_a_mix_may_be_rows(config):
    mix = {"mix": [{"path": ROWS}, {"path": ROWS[:1], "weight": 3}]}
    found = with_inputs(config(prompts=mix), resume=False).prompts
    assert [Path(part.location).read_text().count("\n") for part in found.parts()] == [2, 1]
    assert found.weights == [1.0, 3.0] and len(record()) == 3


def test_the_written_configuration_can_be_read(config, tmp_path):
    found = with_inputs(config(), resume=False)
    (tmp_path / "written.yaml").write_text(as_yaml(found))
    assert load(PPOConfig, tmp_path / "written.yaml", []).rewards == found.rewards


def test_a_configuration_without_objects_is_as_it_was_and_makes_no_directory(config):
    given = config(function="rewards.py:brief", prompts={"path": "p.jsonl"})
    assert with_inputs(given, resume=False) is given and with_inputs(given, resume=True) is given
    assert not Path("run").exists()


def test_a_run_that_is_there_keeps_its_files(config):
    first = with_inputs(config(), resume=False)
    Path("run/metrics.jsonl").write_text("{}\n")
    before = {file: file.read_bytes() for file in Path("run/inputs").iterdir()}
    with pytest.raises(ConfigError, match="already holds a run"):
        with_inputs(config(function=longer), resume=False)
    assert {file: file.read_bytes() for file in Path("run/inputs").iterdir()} == before
    assert with_inputs(config(), resume=True) == first


def test_a_resume_by_the_same_call_is_silent_and_another_function_is_told(config, caplog):
    with_inputs(config(), resume=False)
    with_inputs(config(), resume=True)
    assert not caplog.records
    found = with_inputs(config(function=longer), resume=True)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING and "rewards.r.function: the function longer is not the one" in told.message
    assert "def longer" in Path(found.rewards["r"].function.split(":")[0]).read_text()


def test_the_command_line_says_that_a_resume_needs_the_same_call(config, tmp_path):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(as_yaml(with_inputs(config(), resume=False)))
    answer = CliRunner().invoke(app, ["ppo", "run/config.yaml", "--resume"])
    assert isinstance(answer.exception, ConfigError)
    assert "was given Python objects by rlhf_ray.run() (rewards.r.function, prompts.path)" in str(answer.exception)
    assert "resume it by the same call, with the same objects" in str(answer.exception)


def test_only_a_configuration_of_a_stage_is_run():
    with pytest.raises(ConfigError, match=r"run\(\) got a dict; give it one of SFTConfig, .*PPOConfig"):
        rlhf_ray.run({"model": {"path": "m"}})
