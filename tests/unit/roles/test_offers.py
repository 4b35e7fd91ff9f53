"""What a learner broadcasts is what it would publish through the object store: at ZeRO 1 and 3, and with adapters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def told(policy_model, tmp_path_factory):
    """What the process of `offering_rank` saw."""
    target = tmp_path_factory.mktemp("offers") / "told.json"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("offering_rank.py")), policy_model.path,
                           str(target)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(target.read_text())


@pytest.mark.parametrize("number", range(3), ids=["ZeRO-1", "ZeRO-3", "adapters"])
def test_the_same_bytes_arrive(told, number):
    assert told[number]["same"] and told[number]["tensors"] > 10 and told[number]["buckets"] > 2


def test_with_adapters_most_tensors_may_stay_out_later(told):
    assert [one["left_out"] for one in told[:2]] == [0, 0]
    assert told[2]["left_out"] == told[2]["tensors"] - 2, "of two layers one projection each changes"
