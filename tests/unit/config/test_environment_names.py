"""What `--environment` accepts."""

import pytest

from rlhf_ray.config.environment_names import MAX_TOKENS, named_environments
from rlhf_ray.errors import ConfigError


def test_an_object_in_a_file_or_module_is_an_environment_with_its_name():
    (name, config), = named_environments("my_env.py:Calculator", max_turns=4).items()
    assert (name, config.path, config.max_turns, config.max_tokens) == (
        "Calculator", "my_env.py:Calculator", 4, MAX_TOKENS)
    assert list(named_environments("package.module:größe")) == ["environment"], "a metric's name is ASCII"


def test_a_yaml_file_has_several_and_keeps_what_is_not_given(tmp_path):
    (tmp_path / "run.yaml").write_text("environments: {a: {path: 'e.py:A', max_turns: 3}, b: {path: 'e.py:B'}}")
    found = named_environments(str(tmp_path / "run.yaml"))
    assert {name: each.max_turns for name, each in found.items()} == {"a": 3, "b": 16}
    found = named_environments(str(tmp_path / "run.yaml"), max_turns=5)
    assert {name: each.max_turns for name, each in found.items()} == {"a": 5, "b": 5}


def test_what_is_none_is_refused_with_what_would_be(tmp_path):
    with pytest.raises(ConfigError, match="--environment='Calculator' is no environment; write file.py:name"):
        named_environments("Calculator")
    (tmp_path / "run.yaml").write_text("environments: {a: {pth: 'e.py:A'}}")
    with pytest.raises(ConfigError, match="`environments` is not valid: a.pth: Extra inputs are not permitted"):
        named_environments(str(tmp_path / "run.yaml"))
    (tmp_path / "other.yaml").write_text("prompts: {path: p.jsonl}")
    with pytest.raises(ConfigError, match="has no section `environments`"):
        named_environments(str(tmp_path / "other.yaml"))
