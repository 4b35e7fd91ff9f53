"""An evaluation alone: what it takes from a file for training, and what it refuses."""

import pytest

from rlhf_ray.config.derived import derive, placements_of
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.stages import TRAINING, EvaluateConfig
from rlhf_ray.data.row_readers import split_of
from rlhf_ray.errors import ConfigError

TRAINED = {
    "run": {"dir": "runs/trained", "steps": 7, "seed": 3, "upload": "s3://bucket/trained", "auto_resume": True},
    "logging": {"trackers": ["wandb"], "judge": "vader"},
    "cluster": {"derived": ["pools", "generator.chunk", "weights.transport"]},
    "pools": {"default": {"cpus": 64}},
    "generator": {"chunk": 3, "sleep_level": 1},
    "policy": {"lora": {"rank": 4}},
    "algorithm": {"preset": "dapo", "dynamic_sampling": {"max_batches": 3}},
    "coordinator": {"samples_per_prompt": 16},
    "reference": {"threads": 2},
    "evaluation": {"every": 10, "prompts": "e.jsonl"},
    "weights": {"transport": "nccl"},
}


def test_what_concerns_training_is_left_out_of_a_file(write, caplog):
    config = load(EvaluateConfig, write("ppo", **TRAINED), [])
    assert (config.run.seed, config.run.dir, config.run.upload, config.run.auto_resume) == (
        3, "runs/default", None, False)
    assert (config.logging.judge, config.logging.trackers) == ("vader", [])
    assert config.policy.lora is None and config.weights.transport == "object_store"
    assert (config.pools["default"].cpus, config.generator.chunk) == (1.0, 16), "derived for other machines"
    assert config.evaluation.prompts == "e.jsonl" and config.evaluation.every == 0
    assert not caplog.records


def test_neither_learners_nor_a_reference_are_placed(write):
    config = load(EvaluateConfig, write("ppo", **TRAINED), [])
    assert set(placements_of(config)) == {"generator", "reward", "assembler"}
    assert not derive(config).uses_reference
    asked = load(EvaluateConfig, write("ppo", **TRAINED), ["--reference.path=r"])
    assert set(placements_of(asked)) == {"generator", "reward", "assembler", "reference"}
    episodes = load(EvaluateConfig, write("ppo", environments={"e": {"path": "e.py:E", "max_tokens": 1024}}), [])
    assert "episode_runner" in placements_of(episodes)


@pytest.mark.parametrize("field", ["algorithm.kl.coef=0.1", "policy.workers=2", "run.steps=5", "evaluation.every=5"])
def test_what_concerns_training_is_a_warning_on_the_command_line(write, field, caplog):
    load(EvaluateConfig, write("ppo"), [f"--{field}"])
    assert f"{field} [--{field.partition('=')[0]}] has no effect: an evaluation makes no updates" in caplog.text


def test_what_an_evaluation_would_not_write_is_refused_on_the_command_line(write):
    with pytest.raises(ConfigError, match=r"logging.trackers=\[wandb\] has no effect: an evaluation makes no updates"):
        load(EvaluateConfig, write("ppo"), ["--logging.trackers=[wandb]"])


def test_without_held_out_rows_all_prompts_are_taken(write):
    prompts = {"mix": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"}], "column": "q", "limit": 9}
    taken = load(EvaluateConfig, write("ppo", prompts=prompts), []).evaluation
    assert [part.path for part in taken.mix] == ["a.jsonl", "b.jsonl"] and (taken.column, taken.limit) == ("q", 9)
    plain = load(EvaluateConfig, write("ppo"), ["--evaluation.limit=5"]).evaluation
    assert (plain.prompts, plain.limit) == ("p.jsonl", 5)
    hub = load(EvaluateConfig, write("ppo", prompts={"path": "team/set"}), [])
    assert str(split_of(derive(hub).evaluation_prompts)) == "train", "the rows of prompts, not a test split"
    held_out = load(EvaluateConfig, write("ppo", prompts={"path": "p.jsonl", "held_out": 0.2}), [])
    assert not held_out.evaluation.has_data and derive(held_out).evaluation_prompts is None


def test_the_saved_configuration_has_what_was_used_and_gives_the_same_evaluation(write, tmp_path):
    config = load(EvaluateConfig, write("ppo", **TRAINED), ["--evaluation.samples_per_prompt=4"])
    saved = tmp_path / "config.yaml"
    saved.write_text(as_yaml(config))
    assert not [section for section in TRAINING if f"\n{section}:" in saved.read_text()]
    again = load(EvaluateConfig, saved, [])
    assert (again.evaluation, again.generator, again.rewards) == (config.evaluation, config.generator, config.rewards)
