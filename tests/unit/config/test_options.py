"""Every field of every stage acts, is warned of, or is refused: a row of `option_rows` shows it."""

import ast
import dataclasses
import logging
from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rlhf_ray.config.conditional_fields import CONDITIONAL_FIELDS
from rlhf_ray.config.fields import section_of_items, sections_of, sections_of_values
from rlhf_ray.config.load import STAGES, load, resolve
from rlhf_ray.config.serving import ServingConfig
from rlhf_ray.config.stages import EvaluateConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.stages.compare import CompareOptions
from rlhf_ray.stages.generate import GenerateOptions
from tests.models import make_tiny_llama, make_tiny_reward_model
from tests.unit.config.conftest import MINIMAL
from tests.unit.config.option_rows import ROWS, Differs, Refused, Row, Shown, Warned

ROOT = Path(__file__).parents[3]
SERVICE, COMMANDS = {"serve-reward": ServingConfig}, {"generate": GenerateOptions, "compare": CompareOptions}


def fields_of(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The paths of all fields of a section and of those within; several sections in one place have theirs united."""
    for name, info in cls.model_fields.items():
        path, annotation = f"{prefix}{name}", info.annotation
        if item := section_of_items(annotation):
            yield from fields_of(item, f"{path}.N.")
        elif values := sections_of_values(annotation):
            for section in values:
                yield from fields_of(section, f"{path}.NAME.")
        elif members := sections_of(annotation):
            for section in members:
                yield from fields_of(section, f"{path}.")
        else:
            yield path


FIELDS = {(stage, path) for stage, cls in {**STAGES, **SERVICE}.items() for path in fields_of(cls)}
FIELDS |= {(command, one.name) for command, cls in COMMANDS.items() for one in dataclasses.fields(cls)}


def covered(row: Row) -> set[tuple[str, str]]:
    return {(stage, path) for stage, path in FIELDS
            if (not row.stages or stage in row.stages) and any(fnmatchcase(path, named) for named in row.fields)}


def test_every_field_has_a_row():
    missing = sorted(FIELDS - set().union(*map(covered, ROWS)))
    assert not missing, (f"no row of tests/unit/config/option_rows.py shows that these fields act: {missing}. Add each "
                         "to a row with the same observable, or add a row: two values and what differs, the words of "
                         "the refusal, or the id of the test that shows it")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row.fields))
def test_every_row_is_of_fields_that_exist(row):
    gone = [named for named in row.fields if not any(fnmatchcase(path, named) for _, path in FIELDS)]
    assert not gone and covered(row), f"no stage has {gone}; remove them from tests/unit/config/option_rows.py"


@pytest.mark.parametrize(("stage", "condition"), [
    pytest.param(stage, condition, id=f"{stage.__name__} {' '.join(condition.fields)}")
    for stage, conditions in CONDITIONAL_FIELDS.items() if stage is not EvaluateConfig  # test_evaluate_config has these
    for condition in conditions])
def test_every_condition_has_a_row_with_its_words(stage, condition):
    kind = Refused if condition.instead else Warned
    refused = {path for row in ROWS if isinstance(row, kind) for at, path in covered(row)
               if at in STAGES and issubclass(STAGES[at], stage)}
    assert any(fnmatchcase(path, named) for path in refused for named in condition.fields), (
        f"add a row {kind.__name__} for {condition.fields} to tests/unit/config/option_rows.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return make_tiny_llama(root / "m", vocab=64, hidden=32, heads=1), make_tiny_reward_model(root / "r", 64)


@pytest.fixture
def settings(models):
    """settings(row, stage, path, value) -> the stage's values with what the row needs."""
    model, reward = map(str, models)

    def put(values: dict[str, Any], path: str, value: Any) -> None:
        *keys, last = path.replace(".NAME", ".main" if path.startswith("rewards") else ".default").split(".")
        for key, after in zip(keys, [*keys[1:], last], strict=True):
            if after == "N":  # a mix in place of a path
                values.pop("path", None)
                values = values.setdefault(key, [{"path": "a.jsonl"}, {"path": "b.jsonl"}])
            else:
                values = values[0] if key == "N" else values.setdefault(key, {})
        values[last] = value

    def make(row: Row, stage: str, path: str, value: Any) -> dict[str, Any]:
        made = deepcopy(MINIMAL[stage])
        made["model"] = {"path": model}
        if stage == "ppo":
            made["rewards"] = {"main": {"type": "model", "path": reward}}
        known = [one for at, one in FIELDS if at == stage]
        for name, other in row.given.items():
            if name == "rewards.NAME" or name.startswith("pools.") or name in known:
                put(made, name, other)
        put(made, path, value)
        return made

    return make


def holder(config: Any, path: str) -> Any:
    """The section that holds a field."""
    for key in path.split(".")[:-1]:
        config = next(iter(config.values())) if key == "NAME" else config[0] if key == "N" else getattr(config, key)
    return config


def cases(kind: type[Row]) -> list[Any]:
    return [pytest.param(row, stage, path, id=f"{stage}-{path}-{number}") for number, row in enumerate(ROWS)
            if isinstance(row, kind) for stage, path in sorted(covered(row)) if stage in STAGES]


@pytest.mark.parametrize(("row", "stage", "path"), cases(Differs))
def test_a_field_acts(row, stage, path, settings):
    seen = []
    for value in row.values:
        config = resolve(STAGES[stage](**settings(row, stage, path, value)))
        seen.append(row.observe(config, holder(config, path)))
    assert seen[0] != seen[1]


def refusal(stage: str, values: dict[str, Any], tmp_path: Path) -> str:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as caught:
        load(STAGES[stage], tmp_path / "c.yaml", [])
    return str(caught.value)


@pytest.mark.parametrize(("row", "stage", "path"), cases(Refused))
def test_a_field_without_effect_is_refused(row, stage, path, settings, tmp_path):
    message = refusal(stage, settings(row, stage, path, row.value), tmp_path)
    assert row.words in message and path.split(".")[-1] in message


@pytest.mark.parametrize(("row", "stage", "path"), cases(Warned))
def test_a_field_without_effect_is_warned_of(row, stage, path, settings, tmp_path, caplog):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings(row, stage, path, row.value)))
    with caplog.at_level(logging.WARNING):
        load(STAGES[stage], tmp_path / "c.yaml", [])
    named = path.replace(".NAME", ".main" if path.startswith("rewards") else ".default").replace(".N.", ".0.")
    assert f"{named}=" in caplog.text and row.words in caplog.text


@cache
def functions_of(file: str) -> set[str]:
    """Names of the functions of a file, with their classes."""
    tree = ast.parse((ROOT / file).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found | {f"{node.name}::{inner.name}" for node in tree.body if isinstance(node, ast.ClassDef)
                    for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row, Shown)], ids=lambda row: " ".join(row.fields))
def test_the_test_that_shows_it_exists(row):
    file, _, name = row.test.partition("::")
    assert name in functions_of(file), f"{row.test} is not there; name the test that shows {row.fields}"


def test_a_system_message_acts_where_any_part_of_a_mix_has_conversations(tmp_path):
    parts = [{"path": "a.jsonl", "text": "text"}, {"path": "b.jsonl", "text": "text"}]
    values = {"model": {"path": "m"}, "data": {"system": "Be brief.", "mix": parts}}
    assert "whole texts" in refusal("sft", values, tmp_path)
    parts[1] = {"path": "b.jsonl", "messages": "talk"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    assert load(STAGES["sft"], tmp_path / "c.yaml", []).data.system == "Be brief."
