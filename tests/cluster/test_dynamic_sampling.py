"""Dynamic sampling in real runs: batches are whole, what is filtered is told, and a run that is killed while other
prompts are being drawn ends as the undisturbed one, bit for bit."""

import json
import time
from contextlib import closing

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import LedgerError
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.conftest import SMALL
from tests.cluster.outside import start
from tests.cluster.resumed import assert_equal_runs, steps

pytestmark = pytest.mark.cluster
FUNCTION = """
def score(responses, **_):
    return [float(len(response.split()) > 8) for response in responses]
"""
STEPS, A_STEP, EACH = 4, 6, 2


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    mine = tmp_path_factory.mktemp("reward") / "mine.py"
    mine.write_text(FUNCTION)
    return {
        **SMALL, "critic": None, "checkpoint": {"every": 1, "every_minutes": 0},
        "generator": {"workers": 1, "chunk": 4},
        "policy": {"workers": 1, "ema_decay": None, "optimizer": {"learning_rate": 1e-3}},
        "rewards": {"main": {"type": "function", "function": f"{mine}:score", "path": None}},
        "algorithm": {"estimator": "grpo", "epochs": 1, "mini_batches": 1, "kl": {"coef": 0.1},
                      "dynamic_sampling": {"max_batches": 20}},
        "coordinator": {"prompts_per_step": A_STEP, "samples_per_prompt": EACH}}


@pytest.fixture(scope="module")
def write(configure):
    """Configuration file of a run in a directory."""
    def configured(directory, sections, **more):
        path = configure(directory, **{**sections, **more})
        text = path.read_text().replace("    path: null\n", "")
        path.write_text(text)
        return path

    return configured


@pytest.fixture(scope="module")
def undisturbed(write, sections, tmp_path_factory):
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    ppo.run(load(PPOConfig, write(directory, sections, run={"steps": STEPS}), []))
    return directory


def test_every_batch_is_whole_and_has_no_prompt_of_equal_scores(undisturbed):
    import pyarrow.parquet as pq

    for step in range(1, STEPS + 1):
        rows = pq.read_table(undisturbed / f"samples/step_{step:06d}.parquet").to_pylist()
        assert len(rows) == A_STEP * EACH
        assert all(first["score"] != second["score"] for first, second in zip(rows[::2], rows[1::2], strict=True))


def test_what_was_filtered_is_in_metrics_ledger_and_report(undisturbed):
    rows = steps(undisturbed)
    filtered = [row["dynamic/filtered"] for row in rows]
    assert [row["dynamic/drawn_per_kept"] for row in rows] == [(A_STEP + gone) / A_STEP for gone in filtered]
    assert sum(filtered) > 0 and not any(row["dynamic/filled"] for row in rows)
    assert any(row["reward/mean"] != 0.5 for row in rows), "the mean of what is kept is 1/2"
    with closing(open_for_reading(undisturbed / "ledger.sqlite")) as db:
        assert audit(db, ended=True) == [] and counts(db)["filtered"] == EACH * sum(filtered)
    assert json.loads((undisturbed / "summary.json").read_text())["ledger"]["filtered"] == EACH * sum(filtered)
    assert f"Dynamic sampling left {EACH * int(sum(filtered))} samples out" in (undisturbed / "report.html").read_text()


def within_a_refill(directory):
    """Whether a step is saved, prompts of the next one are filtered, and others are under way."""
    if not (directory / "checkpoints/step_1").is_dir():
        return False
    try:
        with closing(open_for_reading(directory / "ledger.sqlite")) as db:
            trained, = db.execute("SELECT max(rowid) FROM samples WHERE step IS NOT NULL").fetchone()
            filtered, = db.execute("SELECT max(rowid) FROM samples WHERE state = 'filtered'").fetchone()
            begun, = db.execute("SELECT max(rowid) FROM samples WHERE state IN ('leased', 'generated')").fetchone()
            return (trained or 0) < (filtered or 0) < (begun or 0)
    except LedgerError:
        return False


@pytest.mark.slow
def test_a_run_killed_within_a_refill_ends_as_the_undisturbed_one(undisturbed, write, sections, tmp_path):
    directory, log = tmp_path / "run", tmp_path / "log"
    run = {"steps": STEPS, "auto_resume": True, "dir": str(directory), "seed": 5}
    parent = start(write(directory, sections, run=run), log)
    until = time.monotonic() + 300
    while not within_a_refill(directory):
        assert time.monotonic() < until and parent.poll() is None, log.read_text()
        time.sleep(0.005)
    (driver,) = psutil.Process(parent.pid).children()
    driver.kill()
    assert parent.wait(timeout=400) == 0, log.read_text()
    assert "died of SIGKILL; restarting it from the checkpoint of step" in log.read_text()
    assert_equal_runs(undisturbed, directory)


@pytest.mark.slow
def test_rollouts_that_run_ahead_are_filtered_within_the_bound(write, sections, tmp_path):
    from rlhf_ray.stages import ppo

    directory = tmp_path / "run"
    ahead = {**sections["coordinator"], "max_staleness": 2}
    ppo.run(load(PPOConfig, write(directory, sections, run={"steps": 4}, coordinator=ahead), []))
    rows = steps(directory)
    assert len(rows) == 4 and max(row["staleness/max"] for row in rows) <= 2
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        told = counts(db)
        assert audit(db, ended=True) == [] and told["committed"] == 4 * A_STEP * EACH and told["filtered"] > 0
