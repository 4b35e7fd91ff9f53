"""`check-model`: parts in processes of their own, of which one that fails or dies loses no other."""

import os
import signal

import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.stages import check_model
from rlhf_ray.stages.check_model import PARTS, CheckOptions, CheckReport, Part, outcomes_of, run
from rlhf_ray.stages.model_checks.outcome import Outcome
from tests.models import make_tiny_llama

MODEL = ModelConfig(path="m")


def works(model, tokens):
    print("not in the table")
    return [Outcome("one", "works", f"{model.path} {tokens} in {os.getpid()}"), Outcome("two", "works", "")]


def raises(model, tokens):
    raise ModelError("it is wrong")


def breaks(model, tokens):
    raise ZeroDivisionError("by zero\nand more")


def runs_out_of_memory(model, tokens):
    raise MemoryError


def lacks(model, tokens):
    import no_such_module  # noqa: F401


def is_killed(model, tokens):
    os.kill(os.getpid(), signal.SIGKILL)


def dies(model, tokens):
    os.write(2, b"first line\nlast words\n")
    os._exit(3)


def part(function, reads_text=False):
    return Part(("one", "two"), f"{__name__}:{function.__name__}", "does", reads_text, "do something")


def test_a_part_runs_in_another_process_and_prints_nothing(capfd):
    one, two = outcomes_of(part(works), MODEL, 40)
    assert (one.verdict, two.verdict) == ("works", "works")
    assert one.detail.startswith("m 40 in ") and str(os.getpid()) not in one.detail
    assert one.numbers["seconds"] > 0
    assert "not in the table" not in capfd.readouterr().out


@pytest.mark.parametrize(("function", "verdict", "found", "advice"), [
    (raises, "fails", "it is wrong", "do something"),
    (breaks, "fails", "ZeroDivisionError: by zero", "do something"),
    (runs_out_of_memory, "not checked", "out of memory", check_model.SMALLER),
    (lacks, "not checked", "ModuleNotFoundError: No module named 'no_such_module'", "rlhf-ray doctor"),
    (is_killed, "not checked", "its process was killed (SIGKILL), probably for memory", check_model.SMALLER),
    (dies, "fails", "its process ended with exit code 3: last words", "do something"),
])
def test_what_goes_wrong_becomes_an_outcome(function, verdict, found, advice):
    one, two = outcomes_of(part(function), MODEL, 40)
    assert (one.name, one.verdict, one.detail, one.advice) == ("one", verdict, found, advice)
    assert (two.name, two.verdict, two.detail) == ("two", "not checked", "needs one")


def test_a_part_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(check_model, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(check_model, "GRACE_S", 0.01)
    assert outcomes_of(part(works), MODEL, 40)[0].detail == "no outcome after 0.01 s"


@pytest.fixture
def model(tmp_path):
    return make_tiny_llama(tmp_path / "m", vocab=40, hidden=32, heads=1)


def test_a_part_that_fails_loses_no_other(model, monkeypatch):
    parts = {"tokenizer": PARTS["tokenizer"], "passes": part(dies), "generation": part(works)}
    monkeypatch.setattr(check_model, "PARTS", parts)
    told = []
    report = run(CheckOptions(str(model), tokens=40), told.append)
    assert [o.verdict for o in report.outcomes] == ["warning", "fails", "not checked", "works", "works"]
    assert not report.works and report.model_type == "llama" and report.dtype == "float32"
    assert told == ["tokenizer: encoding and decoding texts", "one, two: does", "one, two: does"]


def test_a_skipped_part_is_listed_and_does_not_count(model, monkeypatch):
    monkeypatch.setattr(check_model, "PARTS", {"tokenizer": PARTS["tokenizer"], "passes": part(dies)})
    report = run(CheckOptions(str(model), skip=("passes",)))
    assert [o.detail for o in report.outcomes[1:]] == ["--skip passes"] * 2
    assert report.works


@pytest.mark.parametrize(("verdict", "expected"), [
    ("works", True), ("warning", True), ("does not apply", True), ("fails", False), ("refused", False),
    ("not checked", False)])
def test_which_verdicts_count_as_working(verdict, expected):
    assert CheckReport("m", "llama", "float32", [Outcome("one", verdict, "")], ()).works is expected


def test_a_model_that_is_none_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(check_model, "outcomes_of", None)
    with pytest.raises(ModelError, match="MODEL='.*gone': no such directory"):
        run(CheckOptions(str(tmp_path / "gone")))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("no json")
    (tmp_path / "m" / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match="no model could be loaded from"):
        run(CheckOptions(str(tmp_path / "m")))


def test_parts_name_the_rows_that_they_give(model):
    for name in ("tokenizer", "stops", "chat", "turns"):
        assert tuple(o.name for o in outcomes_of(PARTS[name], ModelConfig(path=str(model)), 40)) == PARTS[name].rows
