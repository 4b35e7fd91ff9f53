"""The page of several runs: a line for each in common charts, what differs between them, nothing unescaped."""

import json
import re

import pytest

from rlhf_ray.cli.main import app
from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.observability.runs_page import write_runs_page

EVIL = "</script><b>x"


@pytest.fixture
def write(tmp_path):
    """write(name, rows, config) -> a run's directory."""

    def write(name, rows, config="algorithm: {estimator: grpo}\nrewards: {r: {type: number}}\n"):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(config)
        lines = [json.dumps({"step": step, "time": 1.0, **row}) for step, row in enumerate(rows, start=1)]
        (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return directory

    return write


def rewards(*values, **more):
    return [{"reward/mean": value, **more} for value in values]


def figures(page):
    """Lines by the title of their chart: name -> values."""
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    data = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1])
    return {title: {line["name"]: line["y"] for line in figure["data"]}
            for title, figure in zip(titles, data, strict=True)}


def test_the_curves_of_runs_are_in_common_charts(write, tmp_path):
    runs = [write("a", rewards(1.0, 2.0, **{"kl/sequence": 0.5})), write("b", rewards(1.0, 4.0, 8.0))]
    page = write_runs_page(runs, tmp_path / "runs.html").read_text()
    assert figures(page) == {"Reward": {"a": [1.0, 2.0], "b": [1.0, 4.0, 8.0]},
                             "Distance from the reference": {"a": [0.5, 0.5]}}
    cells = [re.sub(r"\s+", " ", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page)]
    assert cells[:5] == ["a", "GRPO", "2 steps in 0 s.", "2 (from 1)", "0.5 (from 0.5)"]
    assert cells[5:10] == ["b", "GRPO", "3 steps in 0 s.", "8 (from 1)", "–"]


def test_settings_that_differ_are_shown_and_no_others(write, tmp_path):
    runs = [write(f"{rate}", rewards(1.0), f"run: {{dir: runs/{rate}, seed: 1}}\npolicy: {{optimizer: "
                  f"{{learning_rate: {rate}}}}}\n") for rate in ("0.1", "0.2")]
    page = write_runs_page(runs, tmp_path / "runs.html").read_text()
    table = page.partition("Settings that differ")[2].partition("</table>")[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table) == ["policy.optimizer.learning_rate", "0.1", "0.2"]
    same = [write("x", rewards(1.0)), write("y", rewards(2.0))]
    assert "Settings that differ" not in write_runs_page(same, tmp_path / "same.html").read_text()


def test_runs_of_the_same_name_are_told_apart_and_many_are_drawn(write, tmp_path):
    runs = [write(f"{letter}/ppo", rewards(1.0)) for letter in "abcdefgh"]
    page = write_runs_page(runs, tmp_path / "runs.html").read_text()
    assert list(figures(page)["Reward"]) == [f"{letter}/ppo" for letter in "abcdefgh"]
    data = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1])[0]["data"]
    assert len({(line["line"]["color"], line["line"]["dash"]) for line in data}) == 8


def test_nothing_of_a_run_is_unescaped(write, tmp_path):
    runs = [write("a", rewards(1.0), f"model: {{path: '{EVIL}'}}\n"), write("b", rewards(1.0))]
    assert EVIL not in write_runs_page(runs, tmp_path / "runs.html").read_text()


def test_what_cannot_be_drawn_is_refused(write, tmp_path):
    one = write("a", rewards(1.0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no metrics\.jsonl"):
        write_runs_page([one, tmp_path / "empty"], tmp_path / "runs.html")
    with pytest.raises(ConfigError, match="named twice"):
        write_runs_page([one, tmp_path / "." / "a"], tmp_path / "runs.html")
    with pytest.raises(ConfigError, match=r"--output .* cannot be written"):
        write_runs_page([one, write("b", rewards(1.0))], tmp_path / "no" / "runs.html")


def test_the_command_writes_one_page_or_the_runs_own_report(write, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    write("a", rewards(1.0)), write("b", rewards(1.0))
    answer = CliRunner().invoke(app, ["report", "a", "b"])
    assert answer.output == "wrote runs.html\n" and (tmp_path / "runs.html").is_file()
    assert not (tmp_path / "a/report.html").exists()
    assert CliRunner().invoke(app, ["report", "a"]).output == "wrote a/report.html\n"
    refused = CliRunner().invoke(app, ["report", "a", "--output", "x.html"])
    assert isinstance(refused.exception, ConfigError)
