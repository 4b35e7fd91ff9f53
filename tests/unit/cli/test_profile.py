"""`rlhf-ray profile` against something that answers as a run does."""

import asyncio
import json
import threading
import time

import pytest
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.observability.control_files import answering
from rlhf_ray.observability.run_directory import RunDirectory

PROFILE = {"step": 7, "seconds": 2.5, "spans": [["policy_learner/0", 0.5, 2.0]], "workers": {"policy_learner/0": {
    "trace": "policy_learner_0.trace.json.gz", "seconds": 2.6,
    "operators": [{"name": f"aten::op{i}", "calls": 10 + i, "own_ms": 90.0 - i} for i in range(9)]}}}


@pytest.fixture
def run(tmp_path):
    """A run's directory; whoever asks for a profile finds one of step 7."""
    directory, listening, over = RunDirectory(tmp_path), threading.Event(), threading.Event()
    directory.metrics.write_text('{"step": 6, "time": 0, "time/step": 1.0}\n')
    directory.write_json("status.json", {"time": time.time()})

    async def profile(_):
        directory.write_json("profile.json", PROFILE)
        (tmp_path / "profile/step_7").mkdir(parents=True)
        (tmp_path / "profile.json").rename(tmp_path / "profile/step_7/profile.json")
        return {"step": 7, "directory": str(tmp_path / "profile/step_7")}

    async def answer():
        async with answering(directory, {"profile": profile}):
            listening.set()
            while not over.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(answer()))
    thread.start()
    assert listening.wait(60)  # what was asked before is refused, as asked of an earlier process
    yield directory
    over.set()
    thread.join()


def test_it_prints_the_busiest_operators_and_makes_the_report_anew(run):
    shown = CliRunner().invoke(app, ["profile", str(run.path)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "step 7, 2.5 s" in shown.output and str(run.path / "profile/step_7") in shown.output
    [line] = [line for line in shown.output.splitlines() if "aten::op0" in line]
    assert line.split() == ["policy_learner/0", "aten::op0", "10", "90.0"]
    assert "aten::op8" not in shown.output
    assert "<h3>Step 7: 2.5 s" in run.report.read_text()


def test_without_a_run_that_goes_on_it_refuses(tmp_path):
    with pytest.raises(ConfigError, match="no run is in progress"):
        CliRunner().invoke(app, ["profile", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(DataError, match="there is no run directory"):
        CliRunner().invoke(app, ["profile", str(tmp_path / "nowhere")], catch_exceptions=False)
    with pytest.raises(ConfigError, match="has ended"):
        (tmp_path / "status.json").write_text(json.dumps({"time": 0, "ended": "finished"}))
        CliRunner().invoke(app, ["profile", str(tmp_path)], catch_exceptions=False)
