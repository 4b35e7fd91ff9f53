"""Where rows come from: several files, saved directories, and all that is malformed at once."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from rlhf_ray.config.data import DemonstrationsConfig, EvaluationPrompts, PreferencesConfig, PromptsConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.load_report import MOST, LoadReport, RowErrors
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.data.row_readers import BLOCK, declared_splits, is_local, read_rows, section_rows, stream_rows
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
    with pytest.raises(DataError, match=r"has no split 'train' \(the default\); it has \['test'\]. Set data.split to"):
        list(section_rows(DemonstrationsConfig(path=str(tmp_path / "many")), RowErrors()))
    for path in (tmp_path / "one", tmp_path / "many"):  # `test` by default, of a data set that has splits
        [block] = section_rows(EvaluationPrompts(path=str(path)), RowErrors())
        assert len(block) == 2
    datasets.Dataset.from_dict({"prompt": ["c"]}, split="test").save_to_disk(str(tmp_path / "held"))
    assert len(read_rows(str(tmp_path / "held"), "test")) == len(read_rows(str(tmp_path / "held"))) == 1
    with pytest.raises(DataError, match=r"one data set without splits, and split='test' would be all of it"):
        read_rows(str(tmp_path / "one"), "test")


@pytest.mark.parametrize(("card", "subset", "splits"), [
    ({}, None, set()), ({"dataset_info": {"splits": [{"name": "train"}, {"name": "test"}]}}, None, {"train", "test"}),
    ({"configs": [{"config_name": "main", "data_files": [{"split": "train", "path": "*"}]}]}, None, {"train"}),
    ({"configs": [{"config_name": "a", "data_files": [{"split": "train", "path": "*"}]},
                  {"config_name": "b", "data_files": [{"split": "dev", "path": "*"}]}]}, "b", {"dev"}),
    ({"configs": [{"config_name": "a"}, {"config_name": "b"}], "dataset_info": "odd"}, None, set()),
    ({"configs": {"data_files": "rows.jsonl"}}, None, set())])
def test_the_splits_that_a_data_set_declares(card, subset, splits):
    assert declared_splits(card, subset) == splits


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


@pytest.mark.parametrize("directory", ["[a]", "a*", "what?", "runs/[2026]-[b]/x"])
@pytest.mark.parametrize("absolute", [True, False])
def test_directories_that_are_named_like_a_pattern(tmp_path, monkeypatch, directory, absolute):
    """They are themselves, and not what the pattern matches; so is a file."""
    monkeypatch.chdir(tmp_path)
    for folder in (directory, "a", "aa", "whats"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in ("rows1.jsonl", "rows[1].jsonl"):
            (Path(folder) / name).write_text(json.dumps({"from": folder, "name": name}) + "\n")
    place = tmp_path / directory if absolute else Path(directory)

    def read(name):
        return [(row["from"], row["name"]) for row in read_rows(str(place / name)).records]

    assert read("rows[1].jsonl") == [(directory, "rows[1].jsonl")]
    assert read("rows[0-9].jsonl") == [(directory, "rows1.jsonl")]
    assert sorted(read("rows*.jsonl")) == [(directory, "rows1.jsonl"), (directory, "rows[1].jsonl")]
    assert is_local(str(place))


def test_a_pattern_of_directories(tmp_path):
    for folder in ("a1", "a2", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(json.dumps({"from": folder}) + "\n")
    for pattern, found in (("a*/rows.jsonl", ["a1", "a2"]), ("[ab]*/*.jsonl", ["a1", "a2", "b"]),
                           ("**/rows.jsonl", ["a1", "a2", "b"])):
        assert [row["from"] for row in read_rows(str(tmp_path / pattern)).records] == found
