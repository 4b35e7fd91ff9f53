"""A run whose KL coefficient is 0: no reference is started, and nothing that is computed from one is reported. The
policy has the bits of a run that measures the KL from another model."""

import pytest
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.stages import ppo
from tests.cluster.conftest import SMALL, VOCAB
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ALGORITHM = {"estimator": "grpo", "epochs": 2, "mini_batches": 2, "kl": {"coef": 0.0, "kind": "fixed"}}
SECTIONS = {**SMALL, "run": {"steps": 2}, "algorithm": ALGORITHM, "pools": {"default": {"cpus": 2}}, "critic": None}
MEASURED = {"kl/sequence", "policy/kl_penalty", "eval/kl", "eval/perplexity", "time/reference"}
"""Metrics that are computed from a reference, or about its work."""


@pytest.fixture(scope="module")
def runs(configure, tmp_path_factory):
    """Directories of a run without a reference, and of one that measures the KL from another model."""
    folder = tmp_path_factory.mktemp("referenced")
    other = make_tiny_llama(folder / "other", VOCAB, hidden=32, heads=1, seed=7)
    sections = {"free": SECTIONS, "measured": {**SECTIONS, "reference": {"path": str(other)}}}
    for name, changes in sections.items():
        ppo.run(load(PPOConfig, configure(folder / name, **changes), []))
    return folder / "free", folder / "measured"


def names_in(run):
    return {name for row in read_metrics(run) for name in row}


def test_nothing_is_said_of_a_reference_that_is_not_there(runs):
    free, measured = map(names_in, runs)
    assert not MEASURED & free and not [name for name in free if "reference_scorer" in name]
    assert measured >= MEASURED and [name for name in measured if "reference_scorer" in name]
    assert "none: algorithm.kl.coef=0" in (runs[0] / "model/README.md").read_text()
    assert str(runs[1].parent / "other") in (runs[1] / "model/README.md").read_text()


def test_the_kl_is_measured_from_the_model_that_is_named(runs):
    """The policy starts as itself, so its first KL from its own start would be 0."""
    row = next(row for row in read_metrics(runs[1]) if "kl/sequence" in row)
    assert abs(row["kl/sequence"]) > 0.05


def test_the_policy_has_the_bits_of_a_run_with_a_reference(runs):
    free, measured = (load_file(run / "model/model.safetensors") for run in runs)
    assert free.keys() == measured.keys() and all(free[name].equal(measured[name]) for name in free)
