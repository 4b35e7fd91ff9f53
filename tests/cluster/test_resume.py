"""A resumed run is the same run; here the newest checkpoint was damaged, so that it goes on from the one before."""

import json
import logging
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from rlhf_ray.checkpoint.atomic_directory import files_under
from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import CheckpointError
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.audit import counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without
from tests.cluster.tiny import SMALL

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def resumed(finished, configure, tmp_path_factory):
    """(directory of the resumed run, the warnings it gave)."""
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(finished.directory, directory)
    for file in ("model", "model_ema", "summary.json", "report.html"):
        shutil.rmtree(directory / file) if (directory / file).is_dir() else (directory / file).unlink()
    flip_a_byte(directory / "checkpoints/step_4/policy_learner/rank_1.safetensors")
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    log = logging.getLogger("rlhf_ray.checkpoint.store")
    log.addHandler(handler)
    try:
        ppo.run(load(PPOConfig, configure(directory), []), resume=True)
    finally:
        log.removeHandler(handler)
    return directory, warnings


def flip_a_byte(path):
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def measured(directory):
    """Rows of metrics without what a clock says."""
    return without(read_metrics(directory), *CLOCKS, TRAFFIC)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(resumed):
    _, warnings = resumed
    assert any("skipping a damaged checkpoint" in w and "step_4" in w and "rank_1" in w for w in warnings)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model", "model_ema"])
def test_the_resumed_run_ends_with_the_same_weights_bit_for_bit(finished, resumed, model):
    directory, _ = resumed
    first, second = ((d / model / "model.safetensors").read_bytes() for d in (finished.directory, directory))
    assert first == second


@pytest.mark.slow
def test_the_resumed_run_measures_the_same_numbers_at_the_same_steps(finished, resumed):
    directory, _ = resumed
    assert [row["step"] for row in measured(directory)] == [0, 1, 2, 3, 4, 4]
    assert measured(directory) == measured(finished.directory)


@pytest.mark.slow
def test_data_order_and_kl_controller_end_where_the_uninterrupted_run_s_do(finished, resumed):
    directories = finished.directory, resumed[0]
    states = [json.loads((d / "checkpoints/step_4/coordinator.json").read_text()) for d in directories]
    assert states[0] == states[1]
    text = json.dumps(states[0])
    assert '"visited"' in text and '"value"' in text, "cursor and controller must be in there"


@pytest.mark.slow
def test_the_ledger_tells_the_same_of_every_sample_and_remembers_what_was_made_twice(finished, resumed):
    directory, _ = resumed
    assert samples(directory) == samples(finished.directory)
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        told = counts(db)
        again = db.execute("SELECT count(*) FROM samples WHERE attempt = 2 AND step IN (3, 4)").fetchone()[0]
    # The finished run's own ledger knew of the two updates that the damaged checkpoint had held.
    assert told["attempts given up"] == again == told["committed"] // 2


@pytest.mark.slow
def test_the_texts_of_the_steps_made_again_are_the_same(finished, resumed):
    import pyarrow.parquet as pq

    for step in (1, 2, 3, 4):
        name = f"samples/step_{step:06d}.parquet"
        assert pq.read_table(resumed[0] / name).equals(pq.read_table(finished.directory / name))


@pytest.mark.slow
def test_the_damaged_checkpoint_was_replaced_by_a_whole_one(resumed):
    assert verify_manifest(resumed[0] / "checkpoints/step_4").step == 4


def cut_short(path):
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [flip_a_byte, cut_short, Path.unlink])
def test_harm_to_any_file_of_a_checkpoint_is_noticed_by_its_name(copy_of_the_run, harm):
    """Of every file that a run has written, of learners, coordinator, ledger and manifest alike."""
    newest = copy_of_the_run / "checkpoints/step_4"
    files = list(files_under(newest))
    assert {"coordinator.json", "ledger.sqlite", "manifest.json", "rank_0.safetensors", "rank_1.safetensors",
            "rng_0.pt", "average_0.pt"} <= {file.name for file in files}
    for file in files:
        whole = file.read_bytes()
        harm(file)
        with pytest.raises(CheckpointError, match=re.escape(file.name)):
            verify_manifest(newest)
        assert CheckpointStore(newest.parent, keep=2).latest().step == 2
        file.write_bytes(whole)
    assert verify_manifest(newest).step == 4


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(copy_of_the_run, configure):
    from rlhf_ray.stages import ppo

    for step in (2, 4):
        flip_a_byte(copy_of_the_run / f"checkpoints/step_{step}/policy_learner/rank_0.safetensors")
    before = (copy_of_the_run / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints .* is intact"):
        ppo.run(load(PPOConfig, configure(copy_of_the_run), []), resume=True)
    assert (copy_of_the_run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one_and_then_with_two_again(finished, configure, tmp_path):
    """At other ZeRO stages: the same run but for the order of sums."""
    from rlhf_ray.stages import ppo

    directory = shutil.copytree(finished.directory, tmp_path / "run")
    shutil.rmtree(directory / "checkpoints/step_4")
    one = {"policy": {"workers": 1, "zero_stage": 3}, "critic": {"workers": 1, "zero_stage": 0}, "run": {"steps": 3}}
    ppo.run(load(PPOConfig, configure(directory, **one), []), resume=True)
    two = {"policy": {"workers": 2, "zero_stage": 2}, "critic": {"workers": 2, "zero_stage": 3}}
    ppo.run(load(PPOConfig, configure(directory, **two), []), resume=True)
    rows, undisturbed = (steps(d) for d in (directory, finished.directory))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, other in zip(rows, undisturbed, strict=True):
        for name in ("reward/mean", "kl/sequence", "policy/loss", "critic/loss", "policy/grad_norm", "response/length"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (row["step"], name)
    assert samples(directory) == samples(finished.directory)


@pytest.fixture(scope="module")
def ahead(configure, tmp_path_factory):
    """A run of 4 steps whose rollouts may be two versions old: when step 2 was saved, all the rest was under way."""
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("ahead") / "run"
    ppo.run(load(PPOConfig, configure(directory, **SMALL, coordinator={"max_staleness": 2}), []))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1])
def test_a_run_goes_on_with_a_smaller_bound_on_staleness_and_trains_on_every_sample_once(
        ahead, configure, tmp_path, bound):
    from rlhf_ray.stages import ppo

    directory = shutil.copytree(ahead, tmp_path / "run")
    shutil.rmtree(directory / "checkpoints/step_4")
    summary = ppo.run(load(PPOConfig, configure(directory, **SMALL, coordinator={"max_staleness": bound}), []),
                      resume=True)
    assert [row["step"] for row in steps(directory)] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in steps(directory)[2:]) <= bound
    assert summary["ledger"]["committed"] == 4 * 16
    trained = [sample[:3] for sample in samples(directory)]
    assert trained == [sample[:3] for sample in samples(ahead)] and len(set(trained)) == 4 * 16
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        dropped = db.execute("SELECT count(*) FROM attempts WHERE reason LIKE ?",
                             (f"%resumed at version 2 with max_staleness={bound}",)).fetchone()[0]
    assert dropped > 0
