"""The benchmark of the estimators: equal budgets, what counts as reached, and what is not run again."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.estimators import runs
from benchmarks.estimators.outcome import Outcome, read_outcome, trailing_means
from benchmarks.estimators.report import HEADINGS, charts, curve, markdown, write_plots, write_tables
from benchmarks.estimators.runs import ESTIMATORS, OWN, run_config
from benchmarks.svg import ticks
from rlhf_ray.config.load import as_yaml
from rlhf_ray.errors import ConfigError

GOLD = [0.1, 0.9, 0.7, 0.8, 0.9, 0.9]


def outcome(name: str = "rloo", seed: int = 0, **changes: object) -> Outcome:
    made = Outcome(estimator=name, seed=seed, gold_before=0.1, gold_after=0.9, kl_before=0.0, kl_after=5.0,
                   distinct=0.99, distinct_bigrams=0.2, seconds=40.0, samples=[128 * (i + 1) for i in range(6)],
                   gold=GOLD, kl=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    return replace(made, **changes)  # type: ignore[arg-type]


def save(config, folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(as_yaml(config))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_all_estimators_share_models_prompts_and_the_budget_of_samples(estimator):
    config = run_config(estimator, 2, 24, Path("/m"), Path("/out"))
    assert config.algorithm.estimator.type == estimator
    assert config.coordinator.samples_per_step == 128
    assert (config.run.steps, config.run.seed, config.run.dir) == (24, 2, "/out")
    usual = run_config("gae", 2, 24, Path("/m"), Path("/out"))
    assert (config.model, config.prompts, config.evaluation) == (usual.model, usual.prompts, usual.evaluation)
    assert config.policy == usual.policy
    assert config.model.path == "/m/sft/model"


def test_settings_of_one_estimator_stay_its_own():
    differing = {name for name in ESTIMATORS if name in OWN}
    assert differing == {"grpo", "reinforce_baseline"}
    coefficients = {run_config(name, 0, 24, Path("m"), Path("o")).algorithm.kl.coef for name in ESTIMATORS
                    if name != "grpo"}
    assert len(coefficients) == 1


def test_the_target_is_reached_when_three_batches_average_it():
    assert trailing_means(GOLD, 3)[:2] == [float("-inf")] * 2
    assert trailing_means(GOLD, 3)[2:] == pytest.approx([0.5667, 0.8, 0.8, 0.8667], abs=1e-4)
    assert outcome(gold=[0.9, 0.0, 0.7, 0.85, 0.9, 0.9]).samples_to_target == 5 * 128
    assert outcome(gold=[0.9] * 6).samples_to_target == 3 * 128, "two batches are too few to tell"
    assert outcome(gold=[0.79] * 6).samples_to_target is None


def test_one_phrase_over_and_over_is_not_learning():
    assert outcome().learned
    assert not outcome(distinct=0.5).learned
    assert not outcome(gold_after=0.79).learned


def test_the_table_averages_over_seeds_and_says_who_missed_the_target():
    table = markdown({"rloo": [outcome(gold_after=0.8), outcome(seed=1, gold_after=0.9, gold=[0.1] * 6)], "grpo": []})
    header, _, row = table.strip().splitlines()
    assert header.count("|") == row.count("|") == len(HEADINGS) + 1
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["`rloo`", "0 1", "0.100", "0.850 ± 0.071", "5.00", "512 (1 of 2)", "40", "0.99", "0.200", "2/2"]


def test_files_hold_every_outcome(tmp_path):
    page, data = write_tables({"rloo": [outcome(gold=[0.1] * 6)]}, {"cores": 2}, tmp_path)
    saved = json.loads(data.read_text())
    assert saved["machine"] == {"cores": 2}
    assert saved["outcomes"][0]["samples_to_target"] is None and saved["outcomes"][0]["learned"] is True
    assert "not reached" in page.read_text()


def test_a_finished_run_is_read(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"samples": 256, "steps": 2, "seconds_loop": 9.5}))
    side = {"gold": 0.1, "kl": 0.0, "distinct": 1.0, "distinct_bigrams": 0.2}
    (tmp_path / "evaluation.json").write_text(json.dumps({"before": side, "after": {**side, "gold": 0.7, "kl": 3.0}}))
    rows = [{"step": 0, "eval/gold": 0.1}, {"step": 1, "reward/gold": 0.2, "kl/sequence": 0.0},
            {"step": 2, "reward/gold": 0.3, "kl/sequence": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_outcome("grpo", 4, tmp_path)
    assert (found.samples, found.gold, found.kl) == ([128, 256], [0.2, 0.3], [0.0, 1.5])
    assert (found.gold_before, found.gold_after, found.kl_after, found.seconds) == (0.1, 0.7, 3.0, 9.5)


class TestRuns:
    """Which runs are made."""

    @pytest.fixture
    def config(self, tmp_path):
        return run_config("rloo", 0, 24, Path("m"), tmp_path / "run")

    @pytest.fixture
    def made(self, monkeypatch):
        calls = []
        monkeypatch.setattr(runs.ppo, "run", lambda config, resume: calls.append((config.run.dir, resume)))
        return calls

    def test_what_is_not_there_or_unfinished_is_run_and_may_resume(self, config, made, tmp_path):
        runs.run_unless_finished(config)
        save(config, tmp_path)
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        runs.run_unless_finished(config)
        assert made == [(config.run.dir, True)] * 2

    def test_what_is_finished_is_not_run(self, config, made, tmp_path):
        save(config, tmp_path)
        (tmp_path / "run" / "summary.json").write_text("{}")
        runs.run_unless_finished(config)
        assert made == []

    def test_a_run_with_other_settings_is_refused(self, config, made, tmp_path):
        save(run_config("rloo", 0, 25, Path("m"), tmp_path / "run"), tmp_path)
        (tmp_path / "run" / "summary.json").write_text("{}")
        with pytest.raises(ConfigError, match="other settings"):
            runs.run_unless_finished(config)
        assert made == []

    def test_models_that_are_not_there_are_told(self, tmp_path):
        with pytest.raises(ConfigError, match=r"prompts\.jsonl is missing"):
            runs.models_of(tmp_path, tmp_path)


class TestPlot:
    """Curves and drawings."""

    def test_curves_are_means_over_seeds_and_steps(self):
        two = [outcome(gold=[0.0, 0.2, 0.4]), outcome(gold=[0.2, 0.4, 0.6])]
        assert curve(two, "gold") == pytest.approx([0.1, 0.2, 0.3])

    @pytest.mark.parametrize(("highest", "expected"), [
        (0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3072, [0, 500, 1000, 1500, 2000, 2500, 3000, 3500]),
        (6.8, list(range(8))), (0.12, [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12]), (0, [0, 1])])
    def test_axes_have_round_numbers_that_reach_the_highest_value(self, highest, expected):
        assert ticks(highest) == pytest.approx(expected)

    def test_both_plots_hold_every_estimator(self, tmp_path):
        outcomes = {name: [outcome(name)] for name in ESTIMATORS}
        html, svg = write_plots(outcomes, tmp_path)
        lines = ET.parse(svg).getroot().findall(".//{*}polyline")
        assert [line.findtext("{*}title") for line in lines] == list(ESTIMATORS) * 2
        assert not re.search(r"<script[^>]+src=", html.read_text())
        assert all(html.read_text().count(f'"name":"{name}"') == 2 for name in ESTIMATORS)

    def test_colours_differ(self):
        (first, _) = charts({name: [outcome(name)] for name in ESTIMATORS})
        assert len({line.colour for line in first.lines}) == len(ESTIMATORS)
