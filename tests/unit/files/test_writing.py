"""Lines read from the end, cut there, and appended after a torn one, in pieces of any size."""

import pytest

from rlhf_ray.errors import SupersededError
from rlhf_ray.files import writing
from rlhf_ray.files.writing import append_json_lines, lines_from_end, truncate_lines
from tests.unit.owners import take_over

TEXTS = [b"", b"a", b"\n", b"a\n", b"\n\n", b"a\n\nb", b"one\ntwo\nthree\n", b"one\r\ntwo\rthree\nf",
         b"x" * 40 + b"\n" + b"y" * 9]


@pytest.fixture(params=[1, 2, 3, 7, 1000])
def piece(request, monkeypatch):
    monkeypatch.setattr(writing, "PIECE", request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_lines_from_the_end_are_the_files_lines_with_their_places(tmp_path, piece, text):
    path = tmp_path / "file"
    path.write_bytes(text)
    found = list(lines_from_end(path))[::-1]
    assert b"".join(line for _, line in found) == text
    assert [line for _, line in found] == [part + b"\n" for part in text.split(b"\n")[:-1]] + (
        [text.split(b"\n")[-1]] if text.split(b"\n")[-1] else [])
    assert all(text[start:].startswith(line) for start, line in found)


@pytest.mark.parametrize("last, left", [(b"b", b"a\nb\n"), (b"c", b"a\nb\nx\nc\n"), (b"q", b""), (b"torn", b"")])
def test_lines_after_the_last_one_to_keep_are_removed(tmp_path, piece, last, left):
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\nx\nc\nd\ntorn")
    truncate_lines(path, lambda line: line == last + b"\n" or line == last)
    assert path.read_bytes() == left


def test_a_line_that_cannot_be_judged_is_not_kept_and_a_missing_file_stays_missing(tmp_path):
    path = tmp_path / "file"
    truncate_lines(path, bool)
    assert not path.exists()
    path.write_bytes(b"1\nx\n")
    truncate_lines(path, lambda line: int(line) > 0)
    assert path.read_bytes() == b"1\n"


def test_only_the_owner_truncates(tmp_path):
    mine = take_over(tmp_path)
    take_over(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"1\n")
    with pytest.raises(SupersededError):
        truncate_lines(path, lambda _: False, mine)
    assert path.read_bytes() == b"1\n"


@pytest.mark.parametrize("before, after", [
    (b"", b""), (b"{}\n", b"{}\n"), (b"{}\n{\"a", b"{}\n"), (b"{\"abcdefghijk", b""), (b"\n", b"\n")])
def test_a_torn_line_is_removed_before_the_next_is_appended(tmp_path, piece, before, after):
    path = tmp_path / "file"
    path.write_bytes(before)
    append_json_lines(path, [{"b": 1}])
    assert path.read_bytes() == after + b'{"b": 1}\n'
