"""Configurations that come with the package: found, and loaded from any directory."""

import json
from pathlib import Path

import pytest

from rlhf_ray.config.load import STAGES
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages import quickstart, recipes
from rlhf_ray.stages.recipes import Recipe, run_once


def test_the_quickstarts_recipes_are_found():
    names = {path.name for path in quickstart.RECIPE.folder().glob("*.yaml")}
    assert {f"{stage.replace('-', '_')}.yaml" for stage in STAGES} <= names


def test_missing_recipes_are_told_with_where_was_looked(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "a" / "b" / "recipes.py"))
    monkeypatch.setattr(recipes.sys, "prefix", str(tmp_path / "prefix"))
    with pytest.raises(ConfigError, match=rf"missing; looked in {tmp_path}.* and {tmp_path}/prefix/share"):
        quickstart.RECIPE.folder()
    installed = tmp_path / "prefix" / "share" / "rlhf-ray" / "configs" / "quickstart"
    installed.mkdir(parents=True)
    assert quickstart.RECIPE.folder() == installed


def test_a_file_may_have_another_name_than_its_stage():
    arithmetic = Recipe("examples/arithmetic", home="runs/arithmetic")
    grpo = arithmetic.config("ppo", Path("/elsewhere"), 3, ["--run.steps=2"], file="grpo")
    assert (grpo.algorithm.estimator, grpo.run.seed, grpo.run.steps) == ("grpo", 3, 2)
    assert grpo.run.dir == "/elsewhere/grpo" and grpo.model.path == "/elsewhere/sft/model"


def test_a_finished_stage_is_not_run_again(tmp_path, capsys):
    def work():
        (tmp_path / "summary.json").write_text(json.dumps({"seconds": 12.5}))

    assert run_once("sft", work, tmp_path) < 5
    assert run_once("sft", lambda: pytest.fail("run again"), tmp_path) == 12.5
    assert "finished before" in capsys.readouterr().out
