"""The examples of gymnasium and reasoning-gym: their configurations, demonstrations and tokenizers fit each other."""

import json
import random
import sys

import pytest

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.errors import ConfigError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.stages import frozen_lake_example, reasoning_gym_example
from rlhf_ray.stages.example_stages import environment_of

EXAMPLES = {"frozen_lake": (frozen_lake_example, "gymnasium", 3_000),
            "reasoning_gym": (reasoning_gym_example, "reasoning_gym", 8_000)}


@pytest.fixture(scope="module", params=EXAMPLES)
def made(request, tmp_path_factory):
    """An example, the directory with its data, and how many demonstrations there are."""
    module, library, count = EXAMPLES[request.param]
    pytest.importorskip(library, reason=f"needs the extra: pip install 'rlhf-ray[{library.replace('_', '-')}]'")
    home = tmp_path_factory.mktemp(request.param)
    module.make_data(home, 0)
    return module, home, count


def test_every_demonstration_is_learned_and_fits_the_model(made):
    module, home, count = made
    sft = module.RECIPE.config("sft", home, 0)
    tokenizer = load_tokenizer(ModelConfig(path=str(home / "data" / "tokenizer")))
    rows, report = load_demonstrations(DemonstrationsConfig(**sft.data.model_dump(exclude_unset=True)), tokenizer)
    assert (report.rows, report.kept) == (count, count)
    assert rows.lengths.max() <= sft.model.architecture.max_positions


def test_the_stages_fit_each_other(made):
    module, home, _ = made
    grpo = module.RECIPE.config("ppo", home, 0, file="grpo")
    [environment] = grpo.environments.values()
    assert grpo.model.path == str(home / "sft/model")
    assert environment.max_tokens <= module.RECIPE.config("sft", home, 0).model.architecture.max_positions
    assert grpo.prompts.numbered is not None and grpo.evaluation.numbered is not None


def test_data_that_are_there_are_kept(made):
    module, home, _ = made
    file = home / "data" / "sft.jsonl"
    text = file.read_text()
    file.write_text("mine")
    module.make_data(home, 0)
    assert file.read_text() == "mine"
    file.write_text(text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_library_that_is_not_installed_is_named_before_anything_is_made(name, monkeypatch, tmp_path):
    module, library, _ = EXAMPLES[name]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"pip install 'rlhf-ray"):
        module.make_data(tmp_path, 0)
    assert not (tmp_path / "data").exists()


def test_careless_walks_reach_the_goal_sometimes():
    pytest.importorskip("gymnasium", reason="needs the extra: pip install 'rlhf-ray[gymnasium]'")
    lake, rng = environment_of(frozen_lake_example.RECIPE, "lake"), random.Random(1)
    walks = [frozen_lake_example.walk(lake(), rng) for _ in range(300)]
    ends = [(frozen_lake_example.place(walk[-2]["content"]), walk[-1]["content"]) for walk in walks]
    assert 0.2 < sum(end == (14, "right") for end in ends) / 300 < 0.5, "the last step from beside the goal"
    assert max(map(len, walks)) <= 24 and {walk[-1]["role"] for walk in walks} == {"assistant"}


def test_shortest_ways_reach_the_goal_in_six_steps(monkeypatch):
    pytest.importorskip("gymnasium", reason="needs the extra: pip install 'rlhf-ray[gymnasium]'")
    monkeypatch.setattr(frozen_lake_example, "CARELESS", 0.0)
    lake, rng = environment_of(frozen_lake_example.RECIPE, "lake"), random.Random(1)
    for _ in range(20):
        walk = frozen_lake_example.walk(lake(), rng)
        assert len(walk) == 12 and frozen_lake_example.place(walk[-2]["content"]) == 14


def test_a_pupil_misreads_signs_or_is_right(monkeypatch):
    work_out = reasoning_gym_example.work_out
    monkeypatch.setattr(reasoning_gym_example, "MISREAD", 1.0)
    assert work_out("4 - 1 + 7", random.Random(0)) == "4 + 1 = 5, 5 - 7 = -2 <answer>-2</answer>"
    monkeypatch.setattr(reasoning_gym_example, "MISREAD", 0.0)
    assert work_out("4 - 9 + 7", random.Random(0)) == "4 - 9 = -5, -5 + 7 = 2 <answer>2</answer>"


def test_demonstrations_have_questions_that_neither_training_nor_evaluation_has(made):
    module, home, count = made
    if module is not reasoning_gym_example:
        pytest.skip("a lake has no questions")
    grpo = module.RECIPE.config("ppo", home, 0, file="grpo")
    assert grpo.prompts.numbered.count + grpo.evaluation.numbered.count < module.FIRST
    row = json.loads((home / "data/sft.jsonl").read_text().splitlines()[7])["messages"]
    episode = environment_of(module.RECIPE, "sums")()
    asked = episode.reset(row={"prompt": "", "index": module.FIRST + 7}, seed=0).messages
    assert row[:2] == asked and len(row) == 3 and count == module.DEMONSTRATIONS
