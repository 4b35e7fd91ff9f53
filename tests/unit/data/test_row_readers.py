"""Where rows come from: several files, saved directories, and all that is malformed at once."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.load_report import MOST, LoadReport, RowErrors
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.data.row_readers import BLOCK, read_rows, stream_rows
from rlhf_ray.errors import DataError


def test_blocks_are_bounded_and_a_limit_reads_no_further(write_jsonl):
    path = write_jsonl(*({"n": n} for n in range(2 * BLOCK + 1)))
    assert [len(block) for block in stream_rows(path, RowErrors())] == [BLOCK, BLOCK, 1]
    assert [len(block) for block in stream_rows(path, RowErrors(), limit=BLOCK + 2)] == [BLOCK, 2]


def test_a_pattern_reads_files_by_name_and_names_each_in_messages(tmp_path: Path, write_jsonl, tokenizer):
    write_jsonl({"prompt": "We saw"}, {"prompt": "We saw the film and"}, name="b.jsonl")
    write_jsonl({"prompt": "I read"}, name="a.jsonl")
    pattern = str(tmp_path / "*.jsonl")
    assert [row["prompt"] for row in read_rows(pattern).records] == ["I read", "We saw", "We saw the film and"]
    assert len(read_rows(pattern, limit=2)) == 2
    report = open_prompts(PromptsConfig(path=pattern, max_tokens=2), tokenizer).reports[0]
    assert report.left_out["longer than max_tokens=2"].lines == {str(tmp_path / "b.jsonl"): array("q", [2])}
    write_jsonl({"prompt": 5}, name="c.jsonl")
    with pytest.raises(DataError, match="c.jsonl, line 1: column 'prompt' must be a text"):
        open_prompts(PromptsConfig(path=pattern), tokenizer)
    with pytest.raises(DataError, match=r"\*\.csv: no such file"):
        read_rows(str(tmp_path / "*.csv"))


def test_a_directory_that_datasets_saved_is_read_by_split(tmp_path: Path):
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "many"))
    for path, split in ((tmp_path / "one", "train"), (tmp_path / "many", "test")):
        assert read_rows(str(path), split).records == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(DataError, match=r"has no split 'train'; it has \['test'\]"):
        read_rows(str(tmp_path / "many"))
    datasets.Dataset.from_dict({"prompt": ["c"]}, split="test").save_to_disk(str(tmp_path / "held"))
    assert len(read_rows(str(tmp_path / "held"), "test")) == len(read_rows(str(tmp_path / "held"))) == 1
    with pytest.raises(DataError, match=r"one data set without splits, and split='test' would be all of it"):
        read_rows(str(tmp_path / "one"), "test")


def bad_prompts(write_jsonl: Any) -> str:
    return write_jsonl({"prompt": "We saw"}, "{broken", {"prompt": ""}, {"prompt": "I read"}, {"text": "x"}, "[1]")


def test_all_malformed_rows_are_named_at_once(write_jsonl, tokenizer):
    with pytest.raises(DataError) as raised:
        open_prompts(PromptsConfig(path=bad_prompts(write_jsonl)), tokenizer)
    said = str(raised.value).splitlines()
    assert said[0] == "4 rows cannot be used:"
    wrong = [(2, "not valid JSON"), (3, "'prompt' is empty"), (5, "no column 'prompt'"), (6, "not list")]
    assert len(said) == 5, "in the order of the file"
    assert all(f"line {n}: " in line and what in line for (n, what), line in zip(wrong, said[1:], strict=True))


@pytest.mark.parametrize(("load", "config", "row"), [
    (load_demonstrations, DemonstrationsConfig, {"text": 1}), (load_preferences, PreferencesConfig, {"prompt": "p"}),
])
def test_supervised_data_names_them_too(write_jsonl, tokenizer, load, config, row):
    with pytest.raises(DataError, match=r"(?s)2 rows cannot be used:.*lines 1, 2: "):
        load(config(path=write_jsonl(row, row)), tokenizer)


def test_reading_stops_after_many_faults(write_jsonl, tokenizer):
    path = write_jsonl(*({"text": "x"} for _ in range(3 * BLOCK)))
    with pytest.raises(DataError) as raised:
        open_prompts(PromptsConfig(path=path), tokenizer)
    said = str(raised.value).splitlines()
    assert said[0] == f"at least {MOST} rows cannot be used (`rlhf-ray data inspect --unusable=FILE` names all):"
    lines = ", ".join(map(str, range(1, MOST + 1)))
    assert said[1:] == [f"  {path}, lines {lines}: no column 'prompt'; the row has ['text']. Set prompts.column, or "
                        "add it"]


def test_a_header_that_names_a_column_twice_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer,answer\na,1,2\n")
    with pytest.raises(DataError, match=r"rows\.csv: the header names 'answer' more than once"):
        read_rows(str(tmp_path / "rows.csv"))


def test_a_long_document_is_a_field(tmp_path):
    (tmp_path / "rows.csv").write_text("text\n" + "a" * 200_000 + "\n")
    assert len(read_rows(str(tmp_path / "rows.csv")).records[0]["text"]) == 200_000


def test_a_lenient_reader_counts_on_and_keeps_the_good_rows(write_jsonl):
    row_errors = RowErrors(lenient=True)
    rows = list(stream_rows(bad_prompts(write_jsonl), row_errors))
    good, values = row_errors.values(rows[0], lambda rows, i: rows.text(i, "prompt"))
    assert (values, good.lines, row_errors.count) == (["We saw", "I read"], [1, 4], 4)
    row_errors.finish(LoadReport("rows.jsonl"), "")
    with pytest.raises(DataError, match="^4 rows cannot be used"):
        row_errors.check()
