"""Learners compare packed passes with transformers' own as they start: on two ranks at every ZeRO stage, in bfloat16,
with gradients recomputed and with adapters. They leave no trace, and stop together."""

import json
import os
import subprocess
import sys

import pytest

from rlhf_ray.engine.distributed import free_address
from tests.unit.roles import probed_rank

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(policy_model, tmp_path_factory):
    """What the two processes of `probed_rank` saw."""
    folder, address = tmp_path_factory.mktemp("probed"), free_address("127.0.0.1")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    ranks = [subprocess.Popen([sys.executable, probed_rank.__file__, policy_model.path, str(rank), address,
                               str(folder / f"{rank}.json")], env=environment, stderr=subprocess.PIPE, text=True)
             for rank in range(2)]
    for rank in ranks:
        _, said = rank.communicate(timeout=280)
        assert rank.returncode == 0, said[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", probed_rank.KINDS)
def test_a_right_model_passes_and_nothing_is_touched(told, kind):
    for rank in told:
        found = rank["kinds"][kind]
        assert 0 < found["told"]["probe_difference"] < (0.1 if "bfloat16" in kind else 1e-4)
        assert found["changed"] == []


@pytest.mark.parametrize("kind", probed_rank.KINDS)
def test_updates_after_it_are_bit_for_bit_those_without(told, kind):
    assert all(rank["kinds"][kind]["same_update"] for rank in told)


def test_scalar_models_are_compared_too(told):
    assert all(0 < started["probe_difference"] < 1e-4 for rank in told for started in rank["scalar"])


@pytest.mark.parametrize("stage", range(2), ids=["ZeRO-1", "ZeRO-3"])
def test_wrong_gradients_on_one_rank_stop_all(told, stage):
    for rank in told:
        assert "gradients of" in rank["refused"][stage] and "differ by" in rank["refused"][stage]
