"""The tools example's configurations and tokenizer: they fit each other and the environment."""

import json
from pathlib import Path

import pytest

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.tool_tasks import WORDS
from rlhf_ray.errors import ConfigError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.stages import tools_example
from rlhf_ray.stages.example_stages import write_verdict


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with the example's data."""
    home = tmp_path_factory.mktemp("tools")
    tools_example.make_data(home, 0)
    return home


@pytest.fixture(scope="module")
def tokenizer(home):
    return load_tokenizer(ModelConfig(path=str(home / "data" / "tokenizer")))


def test_every_demonstration_is_learned_and_fits_the_model(home, tokenizer):
    sft = tools_example.RECIPE.config("sft", home, 0)
    rows, report = load_demonstrations(DemonstrationsConfig(**sft.data.model_dump(exclude_unset=True)), tokenizer)
    assert (report.rows, report.kept) == (4000, 4000)
    assert rows.lengths.max() <= 100 <= sft.model.architecture.max_positions
    assert 0.2 < rows.loss_mask.mean() < 0.4


def test_items_and_numbers_are_a_token_each_wherever_they_stand(tokenizer):
    for word in WORDS:
        [token] = tokenizer(word)["input_ids"]
        for text in (f"How much are {word} and", f'{{"item": "{word}"}}', f"\n{word}\n", f"1+{word}"):
            assert token in tokenizer(text)["input_ids"], text
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_data_that_are_there_are_kept(home):
    file = home / "data" / "sft.jsonl"
    made = file.read_text()
    file.write_text("mine")
    tools_example.make_data(home, 0)
    assert file.read_text() == "mine"
    file.write_text(made)


def test_an_estimator_without_a_configuration_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="the example tools has no --estimator rloo; leave it out, which means grpo"):
        tools_example.run(tmp_path / "run", "rloo", 0, [])
    assert not (tmp_path / "run").exists()


def test_the_verdict_is_the_held_out_episodes_before_and_after(tmp_path, capsys):
    before = {"reward": 0.2, "solved": 0.19, "turns": 4.5, "tool_calls": 3.5, "tool_failures": 0.3}
    after = {"reward": 0.95, "solved": 0.94, "turns": 5.0, "tool_calls": 4.0, "tool_failures": 0.1}
    (tmp_path / "evaluation.json").write_text(json.dumps({"before": before, "after": after, "texts": []}))
    write_verdict(tmp_path, tmp_path, {"SFT": 60.0}, "held-out questions right", tools_example.SHOWN,
                  tools_example.KEPT)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "success_before": 0.19, "success_after": 0.94, "turns_mean": 5.0, "tool_calls": 4.0, "tool_failures": 0.1,
        "seconds": {"SFT": 60.0}}
    assert "19.0% of held-out questions right before, 94.0% after" in capsys.readouterr().out


def test_the_recipe_names_the_environment_beside_it():
    assert tools_example.environment_file().is_file()
    assert Path(tools_example.environment_file()).parent == tools_example.RECIPE.folder()
