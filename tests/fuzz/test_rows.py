"""Data files that make no sense: every row is used, or left out by count and reason, or named in a message of ours."""

import json
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.errors import DataError, ModelError
from rlhf_ray.models.loading import load_tokenizer
from tests.fuzz.budget import cases
from tests.fuzz.values import ANYTHING, TEXTS
from tests.models import make_tiny_tokenizer

COLUMNS = ["prompt", "response", "chosen", "rejected", "text", "chosen_finished", "margin", "other"]
GOOD = st.fixed_dictionaries(
    {
        "prompt": st.just("w2 w3"),
        "response": st.just("w4"),
        "chosen": st.just("w5"),
        "rejected": st.just("w6 w7"),
        "text": st.just("w8 w9"),
    }
)
ROWS = st.one_of(
    GOOD,
    st.builds(
        lambda good, odd: {**good, **odd},
        GOOD,
        st.dictionaries(st.one_of(st.sampled_from(COLUMNS), TEXTS), ANYTHING, max_size=2),
    ),
    ANYTHING,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(directory, 40)
    return load_tokenizer(ModelConfig(path="none", tokenizer=str(directory)))


def demonstrations(path, tokenizer):
    sequences, report = load_demonstrations(DemonstrationsConfig(path=path, max_tokens=16), tokenizer)
    return len(sequences), report


def answered(path, tokenizer):
    config = DemonstrationsConfig(path=path, prompt="prompt", response="response", max_tokens=16)
    sequences, report = load_demonstrations(config, tokenizer)
    return len(sequences), report


def preferences(path, tokenizer):
    pairs, digests, report = load_preferences(
        PreferencesConfig(path=path, max_tokens=16, held_out=0, margin="margin"), tokenizer
    )
    assert len(digests) == len(pairs)
    return len(pairs), report


def prompts(path, tokenizer):
    found = open_prompts(PromptsConfig(path=path, max_tokens=16), tokenizer)
    found.training.rows(range(len(found.training)))
    return len(found.training), found.reports[0]


LOADERS: list[Callable] = [demonstrations, answered, preferences, prompts]


def check(path, tokenizer, rows=None):
    """Each loader accounts for every row, or says what is wrong in an error of ours."""
    for load in LOADERS:
        try:
            used, report = load(str(path), tokenizer)
        except (DataError, ModelError) as error:
            assert str(path) in str(error) or "row" in str(error)
        else:
            assert used == report.kept and report.kept + sum(x.count for x in report.left_out.values()) == report.rows
            assert rows is None or report.rows == rows


@given(st.lists(ROWS, max_size=4))
@cases(100)
def test_json_lines(tmp_path_factory, tokenizer, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(path, tokenizer, len(rows))


PIECES = st.one_of(
    st.binary(max_size=10),
    st.sampled_from(
        [
            b'{"prompt": "w2", "text": "w3"}',
            b"\n",
            b"\r",
            b"\r\n",
            b"\x00",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"\xef\xbb\xbf",
            b"{",
            b'"',
            b",",
            b"prompt,text,chosen,rejected\n",
            b"w2,w3,w4,w5\n",
            b'"w2\n',
            b"[" * 2000,
            b'{"a":' * 2000,
            b"1" * 5000,
            b"NaN",
            b'{"prompt": "\\ud800"}',
            b'{"prompt": 1e999}',
            b"x" * 200_000,
        ]
    ),
)


@given(st.sampled_from([".jsonl", ".csv", ".parquet"]), st.lists(PIECES, max_size=8).map(b"".join))
@cases(150)
def test_any_bytes(tmp_path_factory, tokenizer, kind, content):
    path = tmp_path_factory.mktemp("rows") / f"rows{kind}"
    path.write_bytes(content)
    check(path, tokenizer)


@given(st.lists(st.lists(TEXTS, min_size=4, max_size=4), max_size=4))
@cases(50)
def test_csv(tmp_path_factory, tokenizer, rows):
    import csv

    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([["prompt", "text", "chosen", "rejected"], *rows])
    check(path, tokenizer)


COLUMN = st.sampled_from(
    [
        ([1, 2], pa.int64()),
        ([b"a", b"\xff"], pa.binary()),
        (["w2", None], pa.string()),
        (["w2", "w3 w4"], pa.string()),
        (
            [[{"role": "user", "content": "w2"}], []],
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
        ),
        ([0, 1], pa.timestamp("ns")),
        ([None, None], pa.null()),
        ([True, False], pa.bool_()),
        ([[1], None], pa.list_(pa.int8())),
        ([float("nan"), 1e300], pa.float64()),
        (["", " "], pa.large_string()),
    ]
)


@given(
    st.dictionaries(st.sampled_from(COLUMNS), COLUMN, min_size=1, max_size=4),
    st.integers(0, 300),
    st.binary(max_size=3),
)
@cases(60)
def test_parquet(tmp_path_factory, tokenizer, columns, at, damage):
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()}), path)
    content = bytearray(path.read_bytes())
    content[at : at + len(damage)] = damage
    path.write_bytes(bytes(content))
    check(path, tokenizer)
