"""Fields describe themselves, and the reference page says what the models say."""

from pathlib import Path

import pytest

from rlhf_ray.config.config_docs import reference
from rlhf_ray.config.fields import describe_fields, strings_of
from rlhf_ray.config.load import STAGES, load

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def field(command, path):
    return {f.path: f for f in describe_fields(STAGES[command])}[path]


def test_a_field_says_type_default_bounds_and_sentence():
    f = field("ppo", "policy.zero_stage")
    assert (f.type, f.default, f.bounds, f.required) == ("int", "1", ">= 0, <= 3", False)
    assert f.sentence.startswith("DeepSpeed ZeRO stage")
    assert f.section == "policy"


def test_types_in_plain_words():
    assert field("ppo", "algorithm.kl.kind").type == "fixed | adaptive"
    assert field("ppo", "generator.kv_cache_mb").type == "int or empty"
    assert field("ppo", "policy.optimizer.betas").type == "[float, float]"
    assert field("ppo", "pools.NAME.labels").type == "{text: text}"
    assert field("ppo", "prompts.mix").type == (
        "list of {path, subset, revision, split, limit, weight, numbered, column}")


def test_defaults_are_those_of_the_place_not_of_the_class():
    assert field("ppo", "assembler.cpus").default == "0.05"
    assert field("ppo", "policy.cpus").default == "0.1"
    assert field("reward-model", "training.batch_size").default == "32"
    assert field("sft", "training.batch_size").default == "64"


def test_required_fields_and_those_of_an_optional_section():
    assert field("ppo", "model.path").required
    assert not field("ppo", "evaluation.prompts").required
    assert field("ppo", "evaluation.prompts").default == "empty"


def test_a_union_lists_the_fields_of_both():
    paths = [f.path for f in describe_fields(STAGES["sft"])]
    assert "model.path" in paths
    assert "model.architecture.layers" in paths
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("command", sorted(STAGES))
def test_every_field_has_a_sentence(command):
    assert not [f.path for f in describe_fields(STAGES[command]) if not f.sentence.endswith(".")]


@pytest.mark.parametrize("command", sorted(STAGES))
def test_every_described_default_can_be_given_back(command, write):
    settable = [f for f in describe_fields(STAGES[command]) if "NAME" not in f.path and not f.path.startswith("model.")]
    off = {name for name, field in STAGES[command].model_fields.items() if field.default is None}
    overrides = [
        f"--{f.path}={'null' if f.default == 'empty' else f.default}"
        for f in settable
        if not f.required and f.default != "by type" and f.section not in off
        and not {"lora", "dynamic_sampling", "numbered"}.intersection(f.path.split("."))
        and not f.path.endswith((".path", ".mix"))
    ]
    path = write(command)
    assert load(STAGES[command], path, overrides) == load(STAGES[command], path, [])


def test_the_reference_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: make docs"


@pytest.mark.parametrize("command", sorted(STAGES))
def test_the_reference_page_has_every_field(command):
    text = reference()
    assert f"## `rlhf-ray {command}`" in text
    for f in describe_fields(STAGES[command]):
        assert f"| `{f.path}` |" in text


def test_the_strings_of_a_configuration_have_the_names_that_a_person_writes():
    config = load(STAGES["ppo"], None, ["--model.path=org/name", "--rewards.r={type: model, path: org/reward}",
                                        "--prompts.mix=[{path: a}, {path: b}]"])
    strings = list(strings_of(config))
    assert {("model.path", "org/name"), ("rewards.r.path", "org/reward")} <= set(strings)
    assert [text for name, text in strings if name == "prompts.mix.path"] == ["a", "b"]
