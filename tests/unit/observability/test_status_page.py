"""What `rlhf-ray status` says, from files made by hand."""

import json
import subprocess
import time
from dataclasses import replace

import pytest
from rich.console import Console

from rlhf_ray.errors import DataError
from rlhf_ray.observability.owner_record import ProcessIdentity, Record
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.status_page import status_page

LIVE = {
    "time": 0.0, "step": 2, "steps": 10, "samples": 32, "max_staleness": 0,
    "buffer": {"ready": 8, "under_way": 4, "training": 16, "mb": 1.5},
    "under_way": [{"worker": "generator/1", "phase": "generate", "calls": 3, "seconds": 4.25},
                  {"worker": "policy_learner/0", "phase": "policy_update", "calls": 1, "seconds": 0.5}],
    "chunks": [{"doing": "generated", "chunks": 2, "samples": 8, "oldest": 11, "version": 1, "seconds": 4.3}],
    "leases": [{"samples": 16, "version": 2, "held_by": ["policy_learner", "critic_learner"]}],
}
ELSEWHERE = ProcessIdentity("here", "another boot", 1, 77, 5)


def row(step, seconds, learning):
    return {"step": step, "time": 1.0, "time/step": seconds, "time/publish": 0.1, "throughput/samples_per_second": 8.0,
            "share/generator/busy": 1 - learning, "share/generator/policy_learner": learning,
            "share/policy_learner/busy": learning, "share/policy_learner/generator": 1 - learning}


@pytest.fixture
def shown(tmp_path):
    def show(live=None, rows=(), owner=ELSEWHERE):
        if owner:
            (tmp_path / "owner").mkdir(exist_ok=True)
            (tmp_path / "owner/term_1.json").write_bytes(Record(1, owner, 0.0, 0.0).encoded())
        if live:
            (tmp_path / "status.json").write_text(json.dumps(live))
        if rows:
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        console = Console(width=140, color_system=None)
        with console.capture() as captured:
            console.print(status_page(tmp_path))
        return captured.get()

    return show


def test_a_running_run_says_how_far_it_is_what_waits_and_who_holds_what(shown):
    text = shown(LIVE | {"time": time.time(), "reference": "none: so it is"}, [row(1, 3.0, 0.2), row(2, 1.0, 0.6)])
    assert "reference: none: so it is" in text and "step 2 of 10, running (process 77 on here since 19" in text
    assert "2 s a step, 8 samples/s, 16 s left" in text
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert lines >= {"generator 70% policy learner 30%", "policy learner 30% generator 70%",
                     "generator/1 generate (3 calls) 4.2 s", "policy_learner/0 policy update 0.5 s",
                     "chunks 2 of 8 samples being generated, the oldest is 11, admitted at version 1 4.3 s",
                     "lease 16 samples for the update of version 2, held by policy learner, critic learner",
                     "buffer 8 samples ready, 4 being made, 16 in training 1.5 MiB",
                     "bottleneck: generator, busy for 70% of the time"}
    assert "what to change: generators and learners take turns (70% and 30% of the time)" in text


def test_a_silent_run_is_told_from_one_that_ended(shown):
    text = " ".join(shown(LIVE | {"time": time.time() - 120}).split())  # a long path wraps the line
    assert "no news for 2 min 00 s: process 77 on here hangs or is gone" in text
    text = shown(LIVE | {"time": 5.0, "ended": "stopped by SIGTERM"})
    assert "step 2 of 10, stopped by SIGTERM" in text and "under way" not in text


def test_a_run_is_finished_when_its_summary_is_there(shown, tmp_path):
    made = LIVE | {"step": 10, "ended": "finished"}
    assert "step 10 of 10; writing its summary" in shown(made | {"time": time.time()})
    assert "step 10 of 10; killed before its summary (--resume writes it)" in shown(made)
    (tmp_path / "summary.json").write_text(json.dumps({"stage": "ppo", "steps": 10}))
    assert "step 10 of 10, finished" in shown(made)


def test_a_run_that_was_killed_on_this_machine_is_told_at_once(shown):
    live, here = LIVE | {"time": time.time()}, ProcessIdentity.own()
    child = subprocess.Popen(["true"])
    child.wait()
    gone = replace(here, pid=child.pid)
    assert f"step 4; {gone} is gone (--resume" in shown(rows=[{"step": 4, "time": 1.0}], owner=gone)
    text = shown(live, [{"step": 7, "time": 1.0}], owner=gone)
    assert f"step 7 of 10; {gone} is gone (--resume" in text and "under way" not in text
    assert f"running ({here} since" in shown(live, owner=here)


def test_a_run_of_another_stage_has_its_step_and_pace(shown):
    text = shown(rows=[{"step": 4, "time": 1.0, "time/step": 0.5, "sft/loss": 2.0}])
    assert "step 4; owned by process 77 on here since" in text and "0.5 s a step" in text
    assert "what to change" not in text


def test_a_finished_run_of_another_stage_says_so(shown, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"stage": "sft", "steps": 4, "rows": 9, "seconds": 3.0}))
    assert "step 4 of 4, finished" in shown(rows=[{"step": 4, "time": 1.0, "time/step": 0.5, "sft/loss": 2.0}])


def test_a_finished_stage_without_steps_says_what_it_made(shown, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(
        {"stage": "preferences", "pairs": 5177, "left_out": 823, "seconds": 103.0, "output": "p.jsonl"}))
    said = "Finished in 1 min 43 s: pairs 5177, left out 823."
    assert said in shown()
    (tmp_path / "config.yaml").write_text("model: {path: m}\n")
    assert said in write_report(tmp_path).read_text() and "No step" not in (tmp_path / "report.html").read_text()


def test_a_run_that_starts_its_workers_says_who_does(shown):
    text = shown()
    assert "no step yet; owned by process 77 on here since" in text and "no step is finished yet" in text


def test_a_directory_without_a_run_is_refused(shown, tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").touch()
    with pytest.raises(DataError, match=rf"holds no started run.*, such as {tmp_path}/sft$"):
        shown(owner=None)
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(DataError, match="status.json cannot be read"):
        status_page(tmp_path)


def test_steps_in_which_a_worker_was_missing_do_not_speak_of_other_settings(shown):
    idle = row(2, 60.0, 0.5) | {f"share/{role}/{who}": share for role in ("generator", "policy_learner") for who, share
                                in (("busy", 0.05), ("generator", 0.0), ("policy_learner", 0.0), ("coordinator", 0.95))}
    live = LIVE | {"time": time.time(), "quarantined": 1}
    assert "no role works" in shown(live, [row(1, 3.0, 0.5), idle])
    text = shown(live, [row(1, 3.0, 0.5), idle | {"faults/lost_workers": 1.0}])
    assert "no role works" not in text and "take turns (50% and 50%" in text
    assert "1 sample left out" in text
