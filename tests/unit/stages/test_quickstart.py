"""The quickstart's configurations: found, moved below --dir, seeded."""

from pathlib import Path

import pytest

from rlhf_ray.config.stages import StageConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages import quickstart

STAGES = ("sft", "preferences", "reward-model", "ppo")


def texts(value):
    """Every text inside a configuration."""
    if isinstance(value, dict):
        return [text for v in value.values() for text in texts(v)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("place", ["/srv/other place", "here/runs/quickstart2"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_path_moves_below_the_directory(stage, place):
    config = quickstart.RECIPE.config(stage, Path(place), seed=7)
    assert isinstance(config, StageConfig) and config.run.seed == 7
    usual = quickstart.RECIPE.config(stage, Path("runs/quickstart"), seed=7)
    moved = [text for text in texts(config.model_dump()) if place in text]
    assert moved == [text.replace("runs/quickstart", place, 1) for text in texts(usual.model_dump())
                     if "runs/quickstart" in text]
    assert len(moved) >= 3 and all(text.startswith(place) for text in moved)
    assert not [text for text in texts(config.model_dump()) if text.startswith("runs/quickstart")]


def test_stages_hand_over_what_the_next_one_reads():
    sft, pairs, reward, ppo = (quickstart.RECIPE.config(stage, Path("d"), 0) for stage in STAGES)
    model = f"{sft.run.dir}/model"
    assert pairs.model.path == reward.model.path == ppo.model.path == model
    assert reward.data.path == f"{pairs.run.dir}/preferences.jsonl"
    assert ppo.rewards["preference"].path == f"{reward.run.dir}/model"
    assert ppo.logging.judge == pairs.pairs.judge


def test_changes_come_last():
    config = quickstart.RECIPE.config("ppo", Path("d"), 3, ["--run.steps=2", "--run.seed=4", "--algorithm.kl.coef=0.5"])
    assert (config.run.steps, config.run.seed, config.algorithm.kl.coef) == (2, 4, 0.5)
    assert config.run.dir.startswith("d")


@pytest.mark.parametrize("change", ["--logging.judge=null", "--evaluation=null"])
def test_a_quickstart_without_its_verdict_is_refused_at_once(change, tmp_path):
    with pytest.raises(ConfigError, match="ends with the judge's verdict"):
        quickstart.run(tmp_path / "q", 0, [change])
    assert not (tmp_path / "q" / "data").exists()
