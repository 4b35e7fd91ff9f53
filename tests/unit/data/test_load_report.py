import json
from array import array

import numpy as np
import pytest

from rlhf_ray.data.load_report import LeftOut, LoadReport, contents_of, left_out_lines
from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import DataError

ROWS = Rows("rows.jsonl", [{}] * 4, [1, 3, 4, 8])


def lines(*numbers: int) -> LeftOut:
    return LeftOut({"rows.jsonl": array("q", numbers)})


def where(*rows: int) -> np.ndarray:
    return np.isin(np.arange(4), rows)


def test_each_row_is_kept_or_named_once_under_its_first_reason():
    report = LoadReport("rows.jsonl")
    assert report.keep(ROWS, {"empty": where(1), "long": where(1, 3), "odd": where()}).tolist() == [0, 2]
    report.require_rows()
    left_out = {"empty": lines(3), "long": lines(8)}
    assert report == LoadReport("rows.jsonl", rows=4, kept=2, left_out=left_out)


def test_the_report_reads_as_a_sentence_and_names_the_first_lines():
    report = LoadReport("rows.jsonl", 10, 3, {"long": lines(1, 2, 3, 4, 5, 6), "empty": lines(9)})
    assert str(report) == ("rows.jsonl: 3 of 10 rows used; 6 left out: long (lines 1, 2, 3, 4, 5, ...); "
                           "1 left out: empty (line 9)")


def test_the_report_tells_of_rows_held_out():
    assert str(LoadReport("rows.jsonl", 10, 10, held_out=2)) == "rows.jsonl: 10 of 10 rows used, 2 of them held out"


def test_a_report_counts_on_over_blocks_and_files_and_names_every_row():
    report = LoadReport("*.jsonl")
    for start in range(1, 400, 4):
        block = Rows("a.jsonl" if start < 200 else "b.jsonl", [{}] * 4, list(range(start, start + 4)))
        assert report.keep(block, {"long": where(0, 2)}).tolist() == [1, 3]
    assert (report.rows, report.kept, report.left_out["long"].count) == (400, 200, 200)
    named = [json.loads(line) for line in left_out_lines(report.left_out_rows()).splitlines()]
    assert named == [{"source": "a.jsonl" if row < 200 else "b.jsonl", "row": row, "reason": "long"}
                     for row in range(1, 400, 2)]
    assert "long (lines a.jsonl:1, a.jsonl:3, " in str(report)


def test_a_digest_is_of_every_column_of_all_rows_in_their_order_and_of_no_name():
    def digest(*records, source="rows.jsonl"):
        report = LoadReport(source)
        for record in records:  # however they come in blocks
            report.keep(Rows(source, [record], [1]), {})
        return contents_of([report])[0][1]

    one, other = {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}
    whole = digest(one, other)
    assert whole == digest({"answer": 1, "prompt": "a"}, other, source="moved.jsonl")
    changed = [digest(other, one), digest(one), digest(one, {**other, "answer": 3}), digest(one, other, other)]
    assert whole not in changed and len(set(changed)) == 4


def test_a_digest_of_objects_does_not_depend_on_where_they_are_in_memory():
    class Image:
        pass

    def digest(**columns):
        report = LoadReport("saved")
        report.keep(Rows("saved", [{"prompt": "a", **columns}], [1]), {})
        return contents_of([report])[0][1]

    images = Image(), Image()
    assert str(images[0]) != str(images[1]) and digest(image=images[0]) == digest(image=images[1])
    assert digest(image=images[0]) != digest(image=None)


def test_no_row_left_is_an_error_with_reasons_and_fix():
    report = LoadReport("rows.jsonl", fix="raise the limit")
    report.keep(ROWS, {"long": where(0, 1, 2, 3)})
    with pytest.raises(DataError, match=r"no row is left.*0 of 4 rows.*4 left out: long.*raise the limit"):
        report.require_rows()
