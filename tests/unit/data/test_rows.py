import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.config.data import EvaluationPrompts
from rlhf_ray.data.row_readers import _read_hub, read_rows, split_of
from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import DataError


def test_json_lines_keep_their_line_numbers_over_blank_lines(write_jsonl):
    rows = read_rows(write_jsonl({"a": 1}, "", {"a": 2}))
    assert (rows.records, rows.lines) == ([{"a": 1}, {"a": 2}], [1, 3])


def test_limit_takes_the_first_rows_and_reads_no_further(write_jsonl):
    path = write_jsonl({"a": 1}, {"a": 2}, "{broken")
    assert read_rows(path, limit=2).records == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("line", "wrong"), [
    ('{"prompt": "cut off', "not valid JSON: Unterminated string starting at column 12;"),
    ('["a", "list"]', r"a row must be an object \{...\}, not list"),
    ("17", "not int"),
    ('{"n": ' + "9" * 5000 + "}", "JSON that cannot be read"),
    ("[" * 100_000, "JSON that cannot be read|not valid JSON"),
])
def test_a_malformed_line_is_named_with_file_and_number(write_jsonl, line: str, wrong: str):
    path = write_jsonl({"prompt": "fine"}, "", line)
    with pytest.raises(DataError, match=f"rows.jsonl, line 3: .*({wrong})"):
        read_rows(path)


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl, line 2: not UTF-8 text \(byte 16"):
        read_rows(str(file))


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path):
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert read_rows(str(file)).records == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, name: str):
    (tmp_path / name).write_text("\n" if name.endswith("jsonl") else "prompt\n")
    with pytest.raises(DataError, match=f"{name}: no rows"):
        read_rows(str(tmp_path / name))


def test_a_missing_file_is_named_with_the_fix(tmp_path: Path):
    with pytest.raises(DataError, match=r".*/absent.jsonl: no such file .*quickstart.*correct the path"):
        read_rows(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        read_rows("absent.jsonl")


def test_a_directory_and_an_unknown_format_are_errors(tmp_path: Path):
    with pytest.raises(DataError, match="not written by `datasets`"):
        read_rows(str(tmp_path))
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(DataError, match=r"unknown format '.txt'"):
        read_rows(str(tmp_path / "rows.txt"))


def test_a_hub_name_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def offline(name: str, subset: str | None, split: str, revision: str | None):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"someone/set is neither a local file .* 'test'.*ConnectionError: no route"):
        read_rows("someone/set", split="test")


def test_a_split_that_a_hub_data_set_does_not_have_is_named_with_those_it_has(tmp_path: Path):
    """A directory of files is read by `datasets` as a Hub data set is."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"prompt": "a"}\n')
    wrong = _read_hub(str(tmp_path / "set"), split_of(EvaluationPrompts(path="someone/set")), None, None)
    with pytest.raises(DataError, match=r"no split 'test' \(the default\); it has \['train'\]. Set evaluation.split"):
        list(wrong)


def test_a_hub_data_set_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch):
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read_rows("someone/set", "test", 2, "main", "v1.0")
    assert (rows.records, rows.lines) == ([{"prompt": "a"}, {"prompt": "b"}], [1, 2])
    assert asked == [(("someone/set", "main"), {"split": "test", "revision": "v1.0"})]


def test_parquet_rows_come_back_with_nested_columns(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"prompt": [{"role": "user", "content": "hi"}], "n": 1}, {"prompt": [], "n": 2}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    rows = read_rows(str(tmp_path / "rows.parquet"))
    assert (rows.records, rows.lines) == (records, [1, 2])


def test_a_damaged_parquet_file_is_an_error(tmp_path: Path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"rows.parquet: not a readable parquet file"):
        read_rows(str(tmp_path / "rows.parquet"))


def test_csv_values_stay_texts_and_quoted_fields_may_span_lines(tmp_path: Path):
    (tmp_path / "rows.csv").write_text('prompt,label\n"one, and\ntwo",NA\n007,\n')
    rows = read_rows(str(tmp_path / "rows.csv"))
    assert rows.records == [{"prompt": "one, and\ntwo", "label": "NA"}, {"prompt": "007", "label": ""}]


@pytest.mark.parametrize("line", ["only one field", "one,two,three"])
def test_a_csv_row_with_other_fields_than_the_header_is_named(tmp_path: Path, line: str):
    (tmp_path / "rows.csv").write_text(f"prompt,label\na,b\n{line}\n")
    with pytest.raises(DataError, match=r"rows.csv, line 3: not as many fields as the header"):
        read_rows(str(tmp_path / "rows.csv"))


def test_a_missing_column_is_an_error_that_lists_the_columns_present():
    rows = Rows("rows.jsonl", [{"question": "q", "answer": "a"}], [4])
    with pytest.raises(DataError, match=r"rows.jsonl, line 4: no column 'prompt'; .* \['answer', 'question'\]"):
        rows.text(0, "prompt")


@pytest.mark.parametrize(("value", "wrong"), [
    (17, r"must be a text, not int \(17\)"), (None, "not NoneType"), (["a"], "not list"), ("", "is empty"),
    ("  \n", "is empty"), ("half \ud83d", "half a surrogate pair at character 6"),
])
def test_a_value_that_is_no_usable_text_is_named(value, wrong: str):
    rows = Rows("rows.jsonl", [{"prompt": value}], [9])
    with pytest.raises(DataError, match=f"rows.jsonl, line 9: column 'prompt' .*{wrong}"):
        rows.text(0, "prompt")


def test_flags_default_and_read_csv_spelling():
    rows = Rows("r", [{"done": True}, {"done": "False"}, {}, {"done": None}, {"done": 1}], [1, 2, 3, 4, 5])
    assert [rows.flag(i, "done", default=True) for i in range(4)] == [True, False, True, True]
    with pytest.raises(DataError, match="line 5: column 'done' must be true or false, not 1"):
        rows.flag(4, "done", default=True)


def test_importing_the_data_package_loads_nothing_heavy():
    modules = ["synthetic_reviews", "tokenizer", "rows", "prompts", "demonstrations", "preferences", "batching"]
    code = (f"import sys; from rlhf_ray.data import {', '.join(modules)}; "
            "print([m for m in ('transformers', 'datasets', 'tokenizers', 'torch', 'vaderSentiment', 'pyarrow') "
            "if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
