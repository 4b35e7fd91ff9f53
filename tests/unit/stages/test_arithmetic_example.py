"""The arithmetic example's configurations: they fit each other, and what they score is the answer."""

from pathlib import Path

import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.arithmetic import Sum, work_out
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.stages import arithmetic_example

FILES = ["grpo", "rloo"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with the example's data."""
    home = tmp_path_factory.mktemp("arithmetic")
    arithmetic_example.make_data(home, 0)
    return home


def test_the_recipe_has_a_file_for_every_estimator_that_the_command_offers():
    assert {"sft", *FILES} <= {path.stem for path in arithmetic_example.RECIPE.folder().glob("*.yaml")}


@pytest.mark.parametrize("file", FILES)
def test_stages_hand_over_what_the_next_one_reads(file):
    sft = arithmetic_example.RECIPE.config("sft", Path("d"), 3)
    ppo = arithmetic_example.RECIPE.config("ppo", Path("d"), 3, file=file)
    assert ppo.model.path == f"{sft.run.dir}/model"
    assert (ppo.algorithm.estimator.type, ppo.run.dir, ppo.run.seed) == (file, f"d/{file}", 3)
    assert {ppo.prompts.path, ppo.evaluation.prompts} == {"d/data/prompts.jsonl", "d/data/eval_prompts.jsonl"}


def test_the_steps_configurations_fit_what_comes_before_them():
    sft, judge = (arithmetic_example.RECIPE.config(stage, Path("d"), 3) for stage in ("sft", "process-reward"))
    ppo = arithmetic_example.RECIPE.config("ppo", Path("d"), 3, file="steps")
    assert {judge.model.path, ppo.model.path} == {f"{sft.run.dir}/model"}
    assert ppo.rewards["columns"].path == f"{judge.run.dir}/model"
    assert [name for name, reward in ppo.rewards.items() if reward.weight] == ["columns"], "the others measure"


def test_judged_steps_fit_the_judge(home):
    from rlhf_ray.data.held_out import split_held_out
    from rlhf_ray.data.stepwise_supervision import load_process_rows

    judge = arithmetic_example.RECIPE.config("process-reward", home, 0)
    tokenizer = load_tokenizer(ModelConfig(path=str(home / "data" / "tokenizer")))
    for path in (judge.data.path, str(home / "data" / "soft_steps.jsonl")):
        data = judge.data.model_copy(update={"path": path})
        _, [held], [report] = split_held_out([load_process_rows(data, judge.steps, tokenizer)], data)
        assert (report.rows, report.kept, len(held)) == (8000, 8000, 800)


def test_the_estimators_differ_in_nothing_else():
    one, two = (arithmetic_example.RECIPE.config("ppo", Path("d"), 0, file=file).model_dump() for file in FILES)
    for config in (one, two):
        del config["run"]["dir"], config["algorithm"]["estimator"]
    assert one == two


def test_data_fit_the_model_and_the_limits(home):
    tokenizer = load_tokenizer(ModelConfig(path=str(home / "data" / "tokenizer")))
    longest = Sum(999, 999)
    prompt, response = (len(tokenizer(text)["input_ids"]) for text in (longest.prompt, work_out(longest, (False,) * 2)))
    assert prompt == len(longest.prompt), "one token a character"
    recipe = arithmetic_example.RECIPE
    sft, ppo = recipe.config("sft", home, 0), recipe.config("ppo", home, 0, file="grpo")
    assert prompt + response + 1 <= sft.data.max_tokens <= sft.model.architecture.max_positions
    assert prompt <= ppo.prompts.max_tokens and response + 1 <= ppo.generator.sampling.max_tokens
    assert ppo.prompts.max_tokens + ppo.generator.sampling.max_tokens <= sft.model.architecture.max_positions


def test_data_that_are_there_are_kept(home):
    file = home / "data" / "sft.jsonl"
    made = file.read_text()
    file.write_text("mine")
    arithmetic_example.make_data(home, 0)
    assert file.read_text() == "mine"
    file.write_text(made)
