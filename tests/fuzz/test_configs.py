"""Configurations that make no sense: each is one message of ours, or a configuration that says what the file says."""


import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.config.fields import describe_fields
from rlhf_ray.config.load import STAGES, as_yaml, load
from rlhf_ray.errors import ConfigError
from tests.fuzz.budget import cases
from tests.fuzz.values import ANYTHING, TEXTS
from tests.unit.config.conftest import MINIMAL

PATHS = {command: [field.path for field in describe_fields(cls)] for command, cls in STAGES.items()}


@st.composite
def documents(draw):
    """(command, nested configuration): a minimal one with some fields set to anything, and some keys that none has."""
    command = draw(st.sampled_from(sorted(MINIMAL)))
    document = {key: dict(value) for key, value in MINIMAL[command].items()}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.one_of(st.sampled_from(PATHS[command]), TEXTS)).replace(
            "NAME", draw(st.sampled_from(["x", "../x"]))
        )
        keys, section = path.split("."), document
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                break
        else:
            section[keys[-1]] = draw(ANYTHING)
    return command, document


def differing(asked, got):
    """Places where a number, text or truth value that was asked for is not what one got."""
    if isinstance(asked, dict) and isinstance(got, dict):
        for key, value in asked.items():
            yield from ((f"{key}.{rest}", *pair) for rest, *pair in differing(value, got.get(key, "nothing")))
    elif asked != got and str(asked) != str(got) and not (isinstance(got, (int, float)) and float(asked) == got):
        yield "", asked, got


@given(documents())
@cases(150)
def test_a_document_is_taken_as_it_stands_or_refused(tmp_path_factory, found):
    command, document = found
    folder = tmp_path_factory.mktemp("config")
    try:
        text = yaml.safe_dump(document, sort_keys=False)
    except (yaml.YAMLError, UnicodeError):
        return
    (folder / "run.yaml").write_text(text, encoding="utf-8", errors="replace")
    try:
        config = load(STAGES[command], folder / "run.yaml", [])
    except ConfigError as error:
        assert str(error)
        return
    if text.isascii():
        assert not list(differing(yaml.safe_load(text), yaml.safe_load(as_yaml(config))))


YAML_PIECES = st.sampled_from(
    [
        "run:",
        "steps: 3",
        "\n",
        "  ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "&a ",
        "*a",
        "<<: *a",
        "!!python/",
        "!!python/object/apply:os.system [id]",
        "!!binary ",
        "? ",
        ": ",
        "| ",
        "> ",
        "'",
        '"',
        "%YAML 1.1\n",
        "---\n",
        "...",
        "# ",
        "\t",
        "\x07",
        "é",
        "model: {path: m}\n",
    ]
)


@given(st.one_of(st.binary(max_size=40), st.lists(YAML_PIECES, max_size=12).map(lambda parts: "".join(parts).encode())))
@cases(150)
def test_any_bytes_are_a_configuration_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.yaml|is required"):
        load(STAGES["ppo"], path, [])


@given(
    st.lists(
        st.one_of(TEXTS, st.tuples(st.sampled_from(PATHS["ppo"]), TEXTS).map("--{0[0]}={0[1]}".format)), max_size=3
    )
)
@cases(100)
def test_any_arguments_are_taken_or_refused(tmp_path_factory, arguments):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL["ppo"]))
    try:
        load(STAGES["ppo"], path, arguments)
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize("text", ["[" * 3000, "[2001-02-30]", "{a: &a [*a]}", "[" + "9" * 5000 + "]", '"\\ud800"'])
def test_an_argument_made_to_break_its_reader(tmp_path, text):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MINIMAL["ppo"]))
    with pytest.raises(ConfigError, match=r"run\.steps"):
        load(STAGES["ppo"], tmp_path / "run.yaml", [f"--run.steps={text}"])


@pytest.mark.parametrize(
    "text",
    [
        "run: " + "[" * 3000 + "]" * 3000,
        "run: " + "{a: " * 3000 + "1" + "}" * 3000,
        "run: &a {b: *a}",
        "run: &a\n  dir: x\n  <<: *a",
        "\n".join(["a0: &a0 {x: 1, y: 1}", *(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40))]),
        "run: {steps: !!python/object/apply:os.system ['true']}",
        "run: {steps: 2001-02-30}",
        "run: {steps: " + "9" * 5000 + "}",
        "? [a]\n: 1",
        "? {a: 1}\n: 1",
        "run: {? [x]: 1}",
        "run: {steps: 60:60}",
        "run: {dir: !!binary x}",
        "run: {seed: 1_0__}",
    ],
)
@pytest.mark.timeout(60)  # one that expands aliases takes 2^40 entries
def test_a_document_made_to_break_its_reader(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load(STAGES["ppo"], tmp_path / "run.yaml", [])
