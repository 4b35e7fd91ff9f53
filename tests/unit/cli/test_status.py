"""`rlhf-ray status --watch`; what a page says is tested in `observability/test_status_page.py`."""

import json
from dataclasses import replace

from rlhf_ray.cli import run_commands
from rlhf_ray.observability.owner_record import ProcessIdentity, Record


def test_watching_ends_with_the_run_and_shows_its_last_page(command_line, tmp_path, monkeypatch):
    record = Record(1, ProcessIdentity("here", "another boot", 1, 77, 5), 0.0, 0.0)
    owner, metrics, waits = tmp_path / "owner/term_1.json", tmp_path / "metrics.jsonl", []
    owner.parent.mkdir()
    owner.write_bytes(record.encoded())
    metrics.write_text(json.dumps({"step": 1, "time": 1.0}) + "\n")

    def sleep(seconds):
        waits.append(seconds)
        metrics.write_text(json.dumps({"step": 1 + len(waits), "time": 1.0}) + "\n")
        if len(waits) == 3:
            owner.write_bytes(replace(record, ended=True).encoded())

    monkeypatch.setattr(run_commands.time, "sleep", sleep)
    outcome = command_line("status", str(tmp_path), "--watch")
    assert outcome.code == 0 and waits == [2, 2, 2]
    assert "step 4" in outcome.out
