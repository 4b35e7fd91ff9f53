"""Configurations that come with the package: found, and loaded from any directory."""

import json
from types import SimpleNamespace

import pytest

from rlhf_ray.errors import ConfigError
from rlhf_ray.stages import bundled_recipes, quickstart
from rlhf_ray.stages.bundled_recipes import run_once


def test_the_quickstarts_recipes_are_found():
    names = {path.name for path in quickstart.RECIPE.folder().glob("*.yaml")}
    assert names == {"sft.yaml", "preferences.yaml", "reward_model.yaml", "ppo.yaml"}


def test_missing_recipes_are_told_with_where_was_looked(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled_recipes, "__file__", str(tmp_path / "a" / "b" / "bundled_recipes.py"))
    monkeypatch.setattr(bundled_recipes.sys, "prefix", str(tmp_path / "prefix"))
    with pytest.raises(ConfigError, match=rf"missing; looked in {tmp_path}.* and {tmp_path}/prefix/share"):
        quickstart.RECIPE.folder()
    installed = tmp_path / "prefix" / "share" / "rlhf-ray" / "configs" / "quickstart"
    installed.mkdir(parents=True)
    assert quickstart.RECIPE.folder() == installed


def test_another_seed_or_family_than_the_one_begun_with_is_refused(tmp_path):
    bundled_recipes.refuse_other_start(tmp_path, 1, "qwen2")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text("run: {seed: 1}\nmodel: {architecture: {family: qwen2}}\n")
    bundled_recipes.refuse_other_start(tmp_path, 1, "qwen2")
    with pytest.raises(ConfigError, match="started with --seed 1, not 2; pass --seed 1"):
        bundled_recipes.refuse_other_start(tmp_path, 2, "qwen2")
    with pytest.raises(ConfigError, match="started with --family qwen2, not llama; pass --family qwen2"):
        bundled_recipes.refuse_other_start(tmp_path, 1)


def test_a_finished_stage_is_not_run_again(tmp_path, monkeypatch, capsys):
    moments = iter([100.0, 104.0])
    monkeypatch.setattr(bundled_recipes, "time", SimpleNamespace(perf_counter=lambda: next(moments)))

    def work():
        (tmp_path / "summary.json").write_text(json.dumps({"seconds": 12.5}))

    assert run_once("sft", work, tmp_path) == 4.0
    assert run_once("sft", lambda: pytest.fail("run again"), tmp_path) == 12.5
    assert "finished before" in capsys.readouterr().out
