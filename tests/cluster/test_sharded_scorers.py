"""Scorers whose models are sharded over two processes, in a whole run: they measure what whole models measure, a lost
rank takes the others of its model with it, and the result is the same to the bit."""

import signal

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.stages import ppo
from tests.cluster.conftest import SMALL
from tests.cluster.faults import WorkerFault, worker_faults
from tests.cluster.processes import descendants
from tests.cluster.resumed import CLOCKS, TRAFFIC, steps, without

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SECTIONS = {
    **SMALL, "run": {"steps": 3}, "algorithm": {"estimator": "reinforce", "kl": {"coef": 0.1, "kind": "fixed"}},
    "cluster": {"heartbeat_timeout_s": 6.0}, "critic": None,
}
SHARDED = {"workers": 2, "shards": 2}
FAULTS = (WorkerFault("reference_scorer/1", "reference", 1, signal.SIGKILL),
          WorkerFault("reward_scorer/0", "reward", 2, signal.SIGSTOP))


@pytest.fixture(scope="module")
def runs(configure, tmp_path_factory):
    """Directories of a run with whole models, of one with sharded ones, and of the latter with lost ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded = {**SECTIONS, "reference": SHARDED, "reward": SHARDED}
    for name, sections, faults in (("whole", SECTIONS, ()), ("sharded", sharded, ()), ("struck", sharded, FAULTS)):
        with worker_faults(*faults):
            ppo.run(load(PPOConfig, configure(folder / name, **sections), []))
    assert all(fault.pids for fault in FAULTS) and descendants() == []
    return folder / "whole", folder / "sharded", folder / "struck"


def test_shards_measure_what_whole_models_measure(runs):
    whole, sharded = (steps(run)[0] for run in runs[:2])
    for name in ("reward/mean", "reward/std", "kl/sequence", "policy/loss", "policy/grad_norm"):
        assert sharded[name] == pytest.approx(whole[name], abs=1e-4), name
    assert sharded["share/reference_scorer/busy"] > 0 and sharded["share/reward_scorer/busy"] > 0


def test_a_lost_rank_is_replaced_with_the_others_of_its_model_and_no_bit_changes(runs):
    _, sharded, struck = runs
    events = {f"{e['role']}/{e['rank']}": e for e in read_faults(struck / "faults.jsonl")}
    assert set(events) <= {"reference_scorer/0", "reference_scorer/1", "reward_scorer/0", "reward_scorer/1"}
    assert {name.partition("/")[0] for name in events} == {"reference_scorer", "reward_scorer"}
    assert all(event["recovery_s"] > 0 and event["redispatched"] > 0 for event in events.values())
    file = "model/model.safetensors"
    assert (struck / file).read_bytes() == (sharded / file).read_bytes()
    one, other = ([without([row], *CLOCKS, TRAFFIC, "faults/") for row in steps(run)] for run in (sharded, struck))
    assert one == other
