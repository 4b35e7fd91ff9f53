"""A run and the same run resumed: how both come about, and what of their numbers must be equal."""

import shutil
from contextlib import closing

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.replay.ledger import open_for_reading

CLOCKS = ("time", "throughput/", "share/", "weights/publish_seconds", "weights/pause_seconds", "weights/canary_",
          "samples/write_s", "checkpoint/", "faults/")
"""Beginnings of the names of metrics that a clock tells, or what went wrong on the way. Which generator the canary
compares depends on how often they were compared before, and its tokens are batched with others."""
TRAFFIC = "coordinator/"
"""Bytes received, which hold timings too."""


def whole_run(configure, sections, tmp_path_factory):
    """Directory of a run of 3 steps, saved after the second and the last."""
    from rlhf_ray.stages import ppo

    whole = tmp_path_factory.mktemp("whole") / "run"
    ppo.run(load(PPOConfig, configure(whole, **sections), []))
    return whole


def resumed_run(whole, configure, sections, tmp_path_factory):
    """Directory of such a run that goes on from where the whole one was after its second step."""
    from rlhf_ray.stages import ppo

    again = shutil.copytree(whole, tmp_path_factory.mktemp("again") / "run")
    shutil.rmtree(again / "checkpoints/step_3")
    ppo.run(load(PPOConfig, configure(again, **sections), []), resume=True)
    return again


def samples(directory):
    """What the ledger says of every sample, but for who drew it and at which attempt; of those that are archived (none
    in a run of fewer than 65,536), the digests of the same."""
    with closing(open_for_reading(directory / "ledger.sqlite")) as db:
        rows = db.execute("SELECT epoch, row, sample, state, version, step FROM samples ORDER BY 1, 2, 3").fetchall()
        return rows + db.execute("SELECT block, digest FROM archive ORDER BY block").fetchall()


def steps(directory):
    """The rows of the training steps."""
    return [row for row in read_metrics(directory) if "reward/mean" in row]


def without(rows, *prefixes):
    """Rows without metrics whose names begin so."""
    return [{name: value for name, value in row.items() if not name.startswith(prefixes)} for row in rows]


def assert_equal_runs(undisturbed, disturbed, *repaired):
    """The same weights, rows of metrics (but for those whose names begin with `repaired`), ledger, texts and
    evaluations."""
    for model in ("model", "model_ema"):
        if (undisturbed / model).is_dir():
            first, second = ((d / model / "model.safetensors").read_bytes() for d in (undisturbed, disturbed))
            assert first == second, model
    rows = [without(read_metrics(d), *CLOCKS, TRAFFIC, *repaired) for d in (undisturbed, disturbed)]
    assert rows[0] == rows[1] and len(rows[0]) > 3
    assert samples(undisturbed) == samples(disturbed)
    assert (undisturbed / "evaluation.json").read_bytes() == (disturbed / "evaluation.json").read_bytes()
    texts = [sorted(p.name for p in (d / "samples").iterdir()) for d in (undisturbed, disturbed)]
    assert texts[0] == texts[1]
