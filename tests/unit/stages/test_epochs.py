"""`run.epochs` becomes as many steps as the training rows fill."""

import json

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig, RewardModelConfig, SFTConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.roles.data_readers import DataReader
from rlhf_ray.stages.epochs import count_prompts, count_rows, with_steps
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return {"path": str(make_tiny_llama(tmp_path_factory.mktemp("models") / "m"))}


@pytest.fixture
def prompts(tmp_path):
    """Ten prompts, of which one is too long."""
    rows = [{"prompt": f"say {word}"} for word in ("one", "two", "three", "four", "five", "six", "seven", "ten", "nil")]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "word " * 200}]))
    return path


def ppo(model, prompts, epochs, **sections):
    return PPOConfig(run={"epochs": epochs}, model=model, rewards={"main": {"type": "number"}},
                     prompts={"path": str(prompts), "max_tokens": 64}, **sections)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.4, 1), (4, 9), (0.01, 1)])
def test_an_epoch_is_every_training_row_once(model, prompts, epochs, steps):
    config = ppo(model, prompts, epochs)
    made = with_steps(config, lambda: count_prompts(config), 4)
    assert count_prompts(config) == 9
    assert (made.run.steps, made.run.epochs) == (steps, None), "nine prompts, four a step"


def test_held_out_prompts_are_no_part_of_it(model, prompts):
    config = ppo(model, prompts, 1)
    config = config.model_copy(update={"prompts": config.prompts.model_copy(update={"held_out": 0.5})})
    assert 0 < count_prompts(config) < 9


def test_a_supervised_stage_counts_its_rows(model, tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    config = SFTConfig(run={"epochs": 3}, model=model, training={"batch_size": 4},
                       data={"path": str(tmp_path / "d.jsonl"), "held_out": 0.2})
    made = with_steps(config, lambda: count_rows(config, DataReader.demonstrations, ()), config.training.batch_size)
    assert made.run.steps == 6, "eight rows are not held out"


def test_without_epochs_nothing_is_counted(model, prompts):
    config = PPOConfig(model=model, rewards={"main": {"type": "number"}}, prompts={"path": str(prompts)})
    assert with_steps(config, lambda: pytest.fail("counted"), 4) is config


def test_what_does_not_fit_the_steps_is_refused(model, prompts):
    config = ppo(model, prompts, 1, algorithm={"critic_warmup_steps": 3})
    with pytest.raises(ConfigError, match="critic_warmup_steps=3 leaves no step of run.steps=3"):
        with_steps(config, lambda: count_prompts(config), 4)


def test_steps_and_epochs_are_refused_together(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {path: d.jsonl}\nrun: {steps: 5}\n")
    with pytest.raises(ConfigError, match=r"epochs=2 and steps=5 both set the number of updates; leave one of them"):
        load(RewardModelConfig, tmp_path / "c.yaml", ["--run.epochs=2"])
