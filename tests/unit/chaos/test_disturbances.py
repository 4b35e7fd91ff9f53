"""Disturbances count as survived when they were seen, and the run went on without losing a worker."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from chaos.driver_under_test import DriverUnderTest
from chaos.injection_log import InjectionLog
from chaos.kinds import KINDS
from chaos.kinds.disturbances import upload_directory
from chaos.memory_groups import MemoryGroup
from chaos.outcomes import outcomes
from chaos.victims import unnoticed

LOST_OUTPUT = """
import os, sys
from chaos.lost_output import break_output
copy = os.dup(1)
print("before", flush=True)
break_output()
for number in (1, copy):
    try:
        os.write(number, b"after")
    except BrokenPipeError:
        print("broken", file=sys.stderr)
"""


def disturbed(fake_run, kind="clock_forward", events=("confirmed", "recovered"), said=""):
    fake_run.start(100, 200, 0, 0, said)
    number = fake_run.injected(kind, 110, confirmed=False)
    for time, event in zip((115, 117), events, strict=False):
        fake_run.line(event, time, fault=number, state="seen", seconds=0.0)
    return fake_run


@pytest.mark.parametrize("events, problem", [
    (("confirmed", "recovered"), ""), (("confirmed",), "no update was made afterwards"),
    ((), "nothing was seen of it")])
def test_it_must_have_been_seen_and_followed_by_an_update(fake_run, events, problem):
    (outcome,) = outcomes(disturbed(fake_run, events=events).record)
    assert outcome.problem == problem and outcome.survived is (not problem)


@pytest.mark.parametrize("lost_at, survived", [(112, False), (112 + 3600, False), (90, True), (150, True)])
def test_no_worker_may_be_lost_meanwhile_by_either_clock(fake_run, lost_at, survived):
    disturbed(fake_run).event("generator", 7, lost_at, 3.0)
    (outcome,) = outcomes(fake_run.record)
    assert outcome.survived is survived
    assert ("generator/0 was lost meanwhile: it died" in outcome.problem) is not survived


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("copied", [b"whole", b"other", None])
def test_a_copy_that_failed_is_reported_and_made_good(fake_run, reported, copied):
    said = "run.upload: copying to /there failed (OSError: full); it is tried again" if reported else ""
    record = disturbed(fake_run, "upload_full", said=said).record
    for directory, manifest in ((record.directory, b"whole"), (upload_directory(record.directory), copied)):
        if manifest is not None:
            (directory / "checkpoints/step_12").mkdir(parents=True, exist_ok=True)
            (directory / "checkpoints/step_12/manifest.json").write_bytes(manifest)
    (outcome,) = outcomes(record)
    assert outcome.survived is (reported and copied == b"whole")


def test_every_descriptor_of_the_output_is_broken():
    done = subprocess.run([sys.executable, "-c", LOST_OUTPUT], capture_output=True, text=True,
                          cwd=Path(__file__).parents[3])
    assert (done.stdout, done.stderr.count("broken")) == ("before\n", 2)


@pytest.mark.parametrize("file, text", [("memory.events", "low 0\noom_kill 2\n"),
                                        ("memory.oom_control", "under_oom 0\noom_kill 2\n")])
def test_the_kernel_s_count_of_kills_is_read_from_both_hierarchies(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    assert MemoryGroup(tmp_path).kills == 2


def test_a_bucket_must_have_been_refused_and_sent_again(fake_run):
    run = disturbed(fake_run, "bucket_flip")
    (outcome,) = outcomes(run.record)
    assert "no generator refused it" in outcome.problem
    event = {"role": "generator", "rank": 0, "pid": None, "kind": "damaged", "lost_at": 115.2, "recovery_s": 0.1,
             "reason": "digest", "outcome": "sent again, intact", "method": "load_weights"}
    (run.record.directory / "faults.jsonl").write_text(json.dumps(event) + "\n")
    (outcome,) = outcomes(run.record)
    assert outcome.survived


def test_only_what_follows_the_last_update_is_hit_at_the_end():
    assert [name for name, kind in KINDS.items() if kind.at_the_end] == ["full_at_export"]


def test_a_disturbance_waits_for_a_victim_that_nobody_has_missed_yet(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    incarnation = [1]
    group = SimpleNamespace(incarnation=lambda rank: incarnation[0])
    driver = DriverUnderTest([], InjectionLog(tmp_path / "log"))
    driver.hit(group, 0, psutil.Process(process.pid))
    assert not unnoticed(driver), "it is alive"
    process.kill()
    process.wait()
    assert unnoticed(driver)
    incarnation[0] += 1  # it is replaced
    assert not unnoticed(driver)
