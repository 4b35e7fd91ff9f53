"""Scorers whose models are sharded over two processes say what one process with whole models says."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from rlhf_ray.engine.distributed import free_address
from rlhf_ray.errors import RewardError, UnscoredSamples
from tests.models import make_tiny_llama
from tests.unit.roles import sharded_rank
from tests.unit.roles.conftest import VOCABULARY

pytestmark = pytest.mark.slow
ROUNDING = {"float32": 1e-5, "untied": 1e-5, "bfloat16": 0.02}
"""Rows are packed with others on each rank, so sums are rounded differently."""


@pytest.fixture(scope="module")
def said(policy_model, reward_model, tmp_path_factory):
    """What one process with whole models says, and each of two with shards."""
    folder, address = tmp_path_factory.mktemp("sharded"), free_address("127.0.0.1")
    (functions := folder / "functions.py").write_text(sharded_rank.SCORED)
    other = make_tiny_llama(folder / "other", VOCABULARY, tied=False, seed=3, hidden=32, heads=1)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    models = [policy_model.path, str(other), reward_model.path, str(functions)]
    processes = [
        subprocess.Popen([sys.executable, sharded_rank.__file__, *models, rank, where, str(folder / name)],
                         env=environment, stderr=subprocess.PIPE, text=True)
        for rank, where, name in (("0", "", "whole"), ("0", address, "first"), ("1", address, "second"))]
    errors = [process.communicate(timeout=280)[1][-3000:] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n\n".join(errors)
    return [pickle.loads((folder / name).read_bytes()) for name in ("whole", "first", "second")]


@pytest.mark.parametrize("model", ROUNDING)
def test_log_probabilities_are_those_of_a_whole_model_on_every_rank(said, model):
    whole, *ranks = (each[model] for each in said)
    for rank in ranks:
        for one, other in zip([*whole["logprobs"], whole["together"]], [*rank["logprobs"], rank["together"]],
                              strict=True):
            assert np.array_equal(one.offsets, other.offsets) and np.abs(one.values).max() > 0.1
            assert np.abs(one.values - other.values).max() < ROUNDING[model]
        assert rank["held"] == pytest.approx(whole["held"] / 2, rel=0.02)
    assert all(np.array_equal(a.values, b.values) for a, b in zip(*(rank["logprobs"] for rank in ranks), strict=True))


def test_scores_are_those_of_whole_models_on_the_first_rank(said):
    whole, first, second = (each["reward"] for each in said)
    for one, other in zip(whole, first, strict=True):
        assert list(one.components) == list(other.components) == ["one", "two", "function"]
        assert other.scores == pytest.approx(one.scores, abs=1e-5) and np.abs(one.components["one"]).max() > 1e-3
        assert one.gold == pytest.approx(3 * one.components["one"], abs=1e-5)
        assert other.gold == pytest.approx(one.gold, abs=1e-5), "the judge's model is sharded, too"
        assert np.array_equal(one.components["function"], other.components["function"])
    assert [list(answer.components) for answer in second] == [["one", "two"]] * 3, "functions run once"


def test_an_error_of_the_first_rank_s_function_is_all_ranks_error(said):
    for each in said:
        assert isinstance(each["failed"], RewardError) and "no score today" in str(each["failed"])
        assert isinstance(each["unscored"], UnscoredSamples)
    assert [s.key for s in said[0]["unscored"].samples] == [s.key for s in said[1]["unscored"].samples]


def test_all_ranks_stop_when_one_s_passes_are_wrong(said):
    assert all("log-probabilities of packed rows differ" in rank["damaged"] for rank in said[1:])
