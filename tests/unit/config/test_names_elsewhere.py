"""Names of other systems: what each leads to exists, loads, and is what the documentation says."""

import re
from pathlib import Path

import pytest
import yaml

from rlhf_ray.config.config_layers import Layer, merge
from rlhf_ray.config.fields import describe_fields
from rlhf_ray.config.load import COMMANDS, STAGES, load
from rlhf_ray.config.names_elsewhere import NAMES_ELSEWHERE, SYSTEMS, meaning_elsewhere, nest, rows_named
from rlhf_ray.config.stages import GRPOConfig, SFTConfig
from rlhf_ray.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
PROMPTS = {"model": {"path": "org/base"}, "prompts": {"path": "org/prompts"}}
WHOLE = {
    "sft": {"model": {"path": "org/base"}, "data": {"path": "org/rows"}},
    "reward-model": {"model": {"path": "org/base"}, "data": {"path": "org/pairs"}},
    "process-reward": {"model": {"path": "org/base"}, "data": {"path": "org/steps"}, "steps": {"placeholder": "?"}},
    "preferences": PROMPTS,
    "ppo": {**PROMPTS, "rewards": {"main": {"type": "model", "path": "org/judge"}},
            "coordinator": {"samples_per_prompt": 8}, "algorithm": {"estimator": "grpo"},
            "evaluation": {"prompts": "org/held_out"}},
}
"""A configuration of each stage whose data sets are on the Hub, so that they have subsets and splits."""


def known(stage):
    paths = [field.path for field in describe_fields(COMMANDS[stage])]
    return set(paths) | {".".join(path.split(".")[:at]) for path in paths for at in range(1, path.count(".") + 1)}


KNOWN = {stage: known(stage) for stage in STAGES}
ROWS = [pytest.param(row, id=" ".join((*row.trl, *row.openrlhf, *row.verl, *row.common)[:2]))
        for row in NAMES_ELSEWHERE]


def message(cls, path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(cls, path, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("row", ROWS)
def test_what_a_row_says_to_write_loads(row, tmp_path):
    stages = [stage for stage in STAGES if row.field_in(KNOWN[stage]) is not None]
    assert stages and (row.carried or row.values or row.note)
    assert all(any(path in KNOWN[stage] for stage in STAGES) for path in row.fields)
    assert bool(row.example) == (row.carried or bool(row.values)), "an example for what can be carried over"
    for stage in stages if row.example else ():
        values = row.values_here(row.field_in(KNOWN[stage]), row.example)
        assert values
        path = tmp_path / f"{stage}.yaml"
        path.write_text(yaml.safe_dump(merge(STAGES[stage], [Layer(WHOLE[stage]), Layer(nest(values))])))
        load(STAGES[stage], path, [])


@pytest.mark.parametrize("stage", STAGES)
def test_a_name_means_one_thing_in_a_stage(stage):
    for system in ("", *SYSTEMS):
        names = [name for row in NAMES_ELSEWHERE if row.field_in(KNOWN[stage]) for name in row.names[system]]
        assert sorted(set(names)) == sorted(names)


def test_no_name_is_one_of_our_own_fields():
    ours = set().union(*KNOWN.values())
    assert not [name for row in NAMES_ELSEWHERE for names in row.names.values() for name in names
                if name in ours and "." in name]


NUMBER = "coordinator: {samples_per_prompt: 8}, or --coordinator.samples_per_prompt=8"


@pytest.mark.parametrize(("section", "overrides", "words"), [
    ({"num_generations": 8}, [], f"num_generations: unknown key; it is TRL's name for coordinator.samples_per_prompt: "
                                 f"write {NUMBER} ["),
    ({}, ["--num-generations=8"], f"num-generations: unknown key; it is TRL's name for coordinator.samples_per_prompt: "
                                  f"write {NUMBER} [--num-generations]"),
    ({"actor_rollout_ref": {"rollout": {"n": 8, "name": "vllm"}}}, [],
     f"actor_rollout_ref.rollout.n: unknown key; it is verl's name for coordinator.samples_per_prompt: write {NUMBER}"),
    ({"actor_rollout_ref": {"rollout": {"n": 8, "name": "vllm"}}}, [],
     "actor_rollout_ref.rollout.name: nothing here is called so"),
    ({}, ["--algo.kl.init_coef", "0.01"], "write algorithm: {kl: {coef: 0.01}}, or --algorithm.kl.coef=0.01 [--algo"),
    ({}, ["--algo.kl.use_loss"], "algorithm: {kl: {placement: loss}}"),
    ({}, ["--bf16"], "policy: {autocast: bfloat16}"),
    ({}, ["--report_to=none"], "write logging: {trackers: []}, or '--logging.trackers=[]' ["),
    ({}, ["--actor.model_name_or_path=m"], "write model: {path: m}, or --model.path=m"),
    ({"critic": {"lr": 3e-6}}, [], "write critic: {optimizer: {learning_rate: 3e-06}}"),
    ({"algorithm": {"estimator": "grpo", "beta": 0.04}}, [], "algorithm.beta: unknown key; it is TRL's name for algo"),
    ({"reward_model_path": "r"}, [], "rewards: {quality: {type: model, path: r}}"),
    ({"per_device_train_batch_size": 4}, [], "it counts rows of a process in a pass, and micro_batch_tokens counts"),
    ({"max_steps": 4}, [], "the nearest to TRL's name is run.steps"),
])
def test_forms_in_which_a_name_is_given(section, overrides, words, tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**WHOLE["ppo"], **section}))
    assert words in message(GRPOConfig, path, overrides)


@pytest.mark.parametrize(("cls", "given"), [
    (SFTConfig, "--max_steps=-1"), (SFTConfig, "--save_steps=0.1"), (GRPOConfig, "--temperature"),
    (GRPOConfig, "--bf16=auto"), (GRPOConfig, "--algo.advantage.estimator=gae")])
def test_a_value_that_our_field_would_refuse_is_not_to_be_written(cls, given, tmp_path):
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump(WHOLE["sft" if cls is SFTConfig else "ppo"]))
    text = message(cls, path, [given])
    assert "name for " in text and "write" not in text


def test_what_is_to_be_written_is_quoted(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(WHOLE["sft"]))
    text = message(SFTConfig, path, ["--output_dir=runs/a: b"])
    assert """write run: {dir: "runs/a: b"}, or '--run.dir=runs/a: b' [""" in text


def test_from_python_the_remedy_is_an_argument():
    with pytest.raises(ConfigError, match=r"write coordinator=\{'samples_per_prompt': 8\}$"):
        GRPOConfig(**WHOLE["ppo"], num_generations=8)


def test_a_value_of_another_meaning_is_not_carried_over(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**WHOLE["ppo"], "max_steps": 4321, "top_p": 0.9876, "scale_rewards": "batch"}))
    text = message(GRPOConfig, path)
    assert "4321" not in text and "0.9876" not in text and "write" not in text


def test_a_stage_has_its_own_meaning_or_says_that_it_has_none(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump({**WHOLE["sft"], "lr": 1e-5, "max_steps": 5, "temperature": 0.7}))
    text = message(SFTConfig, path)
    assert "learner: {optimizer: {learning_rate: 1e-05}}" in text and "run: {steps: 5}" in text
    assert "generator.sampling.temperature, which this stage does not have" in text


def test_a_misspelt_name_of_ours_is_a_misspelt_one(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**WHOLE["ppo"], "coordinator": {"samples_per_promt": 8}}))
    assert "did you mean samples_per_prompt?" in message(GRPOConfig, path)


def options():
    """(our cell, system, names) of each row of the table "Options"."""
    table = PAGE.read_text().partition("\n| meaning | TRL")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|\n ").split(" | ")]
        for system, cell in zip(SYSTEMS, cells[1:4], strict=False):
            spans = [span.removeprefix("--") for span in re.findall(r"`([^`]+)`", cell)]
            yield cells[4], system, [re.split("[ :=]", span)[0] for span in spans]


@pytest.mark.parametrize(("ours", "system", "names"), [each for each in options() if each[2]])
def test_the_table_of_the_documentation_says_the_same(ours, system, names):
    """What is known of the names in a cell leads to fields that the row names."""
    leads = [row for name in names for row, whose in rows_named(name) if whose == system]
    fields = {field for row in leads for field in row.fields} | {field for row in leads for field in row.sets}
    spans = re.findall(r"`([^`]+)`", ours)
    named = {span.split(":")[0].replace("NAME", "quality").removesuffix(".*") for span in spans}
    assert not leads or any(field == name or field.startswith(f"{name}.") or name.startswith(f"{field}.")
                            for field in fields for name in named), (sorted(fields), sorted(named))


def test_the_table_of_the_documentation_is_understood():
    unknown = [names for _, system, names in options() if names
               and not any(whose == system for name in names for _, whose in rows_named(name))]
    assert unknown == [["model"], ["dapo"]]  # called so here too, and verl's reward manager, which is no option


def test_nothing_is_said_of_other_words():
    assert meaning_elsewhere("stepz", 3, KNOWN["ppo"]) is None
