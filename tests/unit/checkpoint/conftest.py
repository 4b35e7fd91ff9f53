"""Runs to copy."""

import pytest

from rlhf_ray.checkpoint import uploader


@pytest.fixture
def run(tmp_path):
    """A run's directory, as far as copies care."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("{}\n")
    (directory / "ledger.sqlite").write_bytes(b"half a transaction")
    return directory


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(uploader, "LOOK_S", 0.01)
    monkeypatch.setattr(uploader, "AGAIN_S", 0.05)
    monkeypatch.setattr(uploader, "LAST_TRIES_S", (0.0, 0.05))
    monkeypatch.setattr(uploader, "PATIENT_S", 0.1)
