"""The disk that chaos fills is one of its own."""

import os

import pytest

from chaos.small_disk import LEFT_BYTES, fill, free, small_disk


def test_a_disk_is_filled_and_freed_and_gone_afterwards(tmp_path):
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("mounting a small tmpfs needs root")
        assert fill(tmp_path / "disk") > 100 << 20
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "disk/more").write_bytes(bytes(2 * LEFT_BYTES))
        free(tmp_path / "disk")
        (tmp_path / "disk/more").write_bytes(bytes(2 * LEFT_BYTES))
    assert os.listdir(tmp_path / "disk") == []
