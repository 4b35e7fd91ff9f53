"""`rlhf-ray check-model`: the table, JSON, and exit codes."""

import json

import pytest

from rlhf_ray.cli.check_model import PartName
from rlhf_ray.stages import check_model
from rlhf_ray.stages.check_model import PARTS, CheckOptions, CheckReport
from rlhf_ray.stages.model_checks.outcome import Outcome


@pytest.fixture
def checked(monkeypatch):
    """checked(verdict) makes the check give it; returns the options of each call."""
    calls = []

    def _give(verdict):
        def run(options, progress):
            calls.append(options)
            progress("passes: comparing")
            return CheckReport("m", "qwen2", "float32",
                               [Outcome("log-probabilities", verdict, "to 1e-6", "do this", {"difference": 1e-6})], ())

        monkeypatch.setattr(check_model, "run", run)
        return calls

    return _give


@pytest.mark.parametrize(("verdict", "code"), [("works", 0), ("fails", 1)])
def test_the_table_and_the_exit_code(verdict, code, checked, command_line):
    checked(verdict)
    outcome = command_line("check-model", "m")
    assert outcome.code == code
    assert [line.split() for line in outcome.out.splitlines()[:2]] == [
        ["log-probabilities", verdict, "to", "1e-6"], ["do", "this"]]
    assert ("m (qwen2, float32) works here" in outcome.out) is (code == 0)
    assert outcome.err == "passes: comparing\n"


def test_json_holds_the_figures(checked, command_line):
    checked("works")
    values = json.loads(command_line("check-model", "m", "--json").out)
    assert values["works"] is True and values["model_type"] == "qwen2"
    assert values["checks"] == [{"name": "log-probabilities", "verdict": "works", "detail": "to 1e-6",
                                 "advice": "do this", "difference": 1e-6}]


def test_options_reach_the_check(checked, command_line):
    calls = checked("works")
    command_line("check-model", "m", "--skip", "generation", "--skip", "lora", "--tokens", "64", "--dtype", "bfloat16",
                 "--float32-head")
    command_line("check-model", "m")
    assert calls == [CheckOptions("m", ("generation", "lora"), 64, "bfloat16", True), CheckOptions("m", (), 256, None)]


def test_a_model_that_does_not_exist_is_refused(command_line):
    outcome = command_line("check-model", "./gone")
    assert outcome.code == 2 and "MODEL='./gone': no such directory" in outcome.err


def test_parts_are_those_that_there_are(command_line):
    assert [str(name) for name in PartName] == list(PARTS)
    assert command_line("check-model", "m", "--skip", "nonsense").code == 2
