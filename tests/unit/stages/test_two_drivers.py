"""Two processes drive one run. The first is stopped, taken for dead by a second one on another host, and goes on: each
of its writes is refused, and the directory is the second one's to the last byte."""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from rlhf_ray.errors import ConfigError
from rlhf_ray.observability import run_directory
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.unit.owners import take_over
from tests.unit.stages.drivers import Driver

FIRST = """
import sys
from rlhf_ray.observability.run_directory import RunDirectory
from tests.unit.stages.drivers import Driver
directory = RunDirectory.create(sys.argv[1])
with directory.owned():
    driver = Driver(directory, "a")
    driver.make_a_step()
    driver.consume()
    tmp = driver.begin()
    print("step 2 is to be committed", flush=True)
    sys.stdin.readline()
    late = {"commit": lambda: driver.store.commit(tmp, 2), "mark": lambda: driver.ledger.mark_committed(2),
            "row": lambda: driver.metrics.write(2, {"loss": 0.0}), "next": driver.make_a_step,
            "status": lambda: directory.write_json("status.json", {"of": "a"}),
            "summary": lambda: directory.write_json("summary.json", {"of": "a"}), "prune": driver.store.clean,
            "close": driver.ledger.close}
    for name, write in late.items():
        try:
            write()
            print(name, "went through", flush=True)
        except Exception as error:
            print(name, type(error).__name__, flush=True)
"""


def contents(directory):
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in directory.rglob("*") if path.is_file()}


def test_a_driver_that_comes_back_changes_nothing(tmp_path, monkeypatch):
    here = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", FIRST, str(here)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "step 2 is to be committed\n"
        with pytest.raises(ConfigError, match=f"by another run, process {process.pid} on"), RunDirectory(here).owned():
            pass
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        monkeypatch.setattr(run_directory, "claim", lambda directory, *_: take_over(directory))
        directory = RunDirectory.create(here, resume=True)
        with directory.owned():
            second = Driver(directory, "b")
            assert second.step == 1
            for _ in range(2):
                second.make_a_step()
            second.ledger.close()
            second.metrics.close()
            directory.write_json("summary.json", {"of": "b"})
            before = contents(here)
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate("go\n", timeout=60)
            assert contents(here) == before
    finally:
        process.kill()
        process.wait()
    assert {line.split()[1] for line in said.splitlines()} == {"SupersededError"} and len(said.splitlines()) == 8
    found = {path.name: (path / "weights").read_text() for path in (here / "checkpoints").iterdir()}
    assert found == {"step_1": "a", "step_2": "b", "step_3": "b"}
    assert [row["step"] for row in read_metrics(here)] == [1, 2, 3]
    with closing(open_for_reading(directory.ledger)) as db:
        assert audit(db, ended=True) == []
        drawn = db.execute("SELECT step, worker FROM samples ORDER BY step").fetchall()
    assert drawn == [(1, "a"), (2, "b"), (3, "b")]
