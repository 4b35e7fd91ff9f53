import numpy as np
import pytest

from rlhf_ray.data.report import LoadReport, keep_rows
from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import DataError

ROWS = Rows("rows.jsonl", [{}] * 4, [1, 3, 4, 8])


def where(*rows: int) -> np.ndarray:
    return np.isin(np.arange(4), rows)


def test_each_row_is_kept_or_named_once_under_its_first_reason():
    kept, report = keep_rows(ROWS, {"empty": where(1), "long": where(1, 3), "odd": where()}, fix="")
    assert kept.tolist() == [0, 2]
    assert report == LoadReport("rows.jsonl", rows=4, kept=2, left_out={"empty": [3], "long": [8]})


def test_the_report_reads_as_a_sentence_and_names_the_first_lines():
    report = LoadReport("rows.jsonl", 10, 3, {"long": [1, 2, 3, 4, 5, 6], "empty": [9]})
    assert str(report) == ("rows.jsonl: 3 of 10 rows used; 6 left out: long (lines 1, 2, 3, 4, 5, ...); "
                           "1 left out: empty (line 9)")


def test_no_row_left_is_an_error_with_reasons_and_fix():
    with pytest.raises(DataError, match=r"no row is left.*0 of 4 rows.*4 left out: long.*raise the limit"):
        keep_rows(ROWS, {"long": where(0, 1, 2, 3)}, fix="raise the limit")
