"""`rlhf-ray scale`: what it asks a run for, and what it says."""

import pytest
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.observability import control_files


def invoke(*arguments):
    return CliRunner().invoke(app, ["scale", *map(str, arguments)])


def test_it_asks_the_run_and_says_what_came_of_it(tmp_path, monkeypatch):
    asked = []

    def ask(*question, **options):
        asked.append((question, options))
        return {"generators": [0, 1, 2], "message": "generators: 2 before, 3 now"}

    monkeypatch.setattr(control_files, "ask", ask)
    result = invoke(tmp_path, "--generators", 3, "--timeout", 20)
    assert result.exit_code == 0 and result.output == "generators: 2 before, 3 now\n"
    assert asked == [((tmp_path, "scale", {"generators": 3}), {"timeout_s": 20.0})]


def test_a_run_that_does_not_go_on_cannot_be_asked(tmp_path):
    assert isinstance(invoke(tmp_path, "--generators", 3).exception, ConfigError)
    assert isinstance(invoke(tmp_path / "nowhere", "--generators", 3).exception, DataError)


@pytest.mark.parametrize("arguments", [(), ("--generators", 0), ("--generators", "many")])
def test_a_number_of_generators_must_be_given(tmp_path, arguments):
    assert invoke(tmp_path, *arguments).exit_code == 2
