"""`rlhf-ray presets`: the list, one as YAML, and a name that there is not."""

import yaml

from rlhf_ray.config.presets import PRESETS


def test_without_a_name_it_lists_every_preset(command_line):
    told = command_line("presets")
    assert told.code == 0
    for name, preset in PRESETS.items():
        assert any(line.split(maxsplit=1) == [name, preset.sentence] for line in told.out.splitlines())


def test_with_a_name_it_prints_values_that_a_file_can_have_with_their_sources(command_line):
    told = command_line("presets", "dr-grpo")
    assert told.code == 0
    assert yaml.safe_load(told.out) == {
        "algorithm": {"estimator": "dr_grpo", "aggregate": "token", "kl": {"coef": 0.0}, "epochs": 1},
        "coordinator": {"samples_per_prompt": 8}}
    assert "estimator: dr_grpo  # Liu et al. 2025: no division by the standard deviation" in told.out


def test_a_name_of_none_is_an_error_with_a_suggestion(command_line):
    told = command_line("presets", "dappo")
    assert told.code != 0 and "there is no preset 'dappo'" in told.err and "dapo" in told.err
