"""PPO with adapters: no reference is started, generators get the adapters alone, or where vLLM cannot compute with them
merged weights, and a resumed run is the same run."""

import json
import shutil
import signal

import pytest
from safetensors.torch import load_file

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.faults import read_faults
from tests.cluster.conftest import SMALL
from tests.cluster.faults import WorkerFault, worker_faults
from tests.cluster.resumed import CLOCKS, TRAFFIC, assert_equal_runs, steps, without
from tests.cluster.tiny import SHARED_BACKBONE

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LORA = {"rank": 4, "alpha": 16, "dropout": 0.1}
TARGETS = ["q_proj", "v_proj", "lm_head"]
KINDS = {
    # Two ranks of the policy, everything sharded; adapters in the critic too.
    "tied": {"policy": {"workers": 2, "zero_stage": 3, "lora": LORA},
             "critic": {"workers": 1, "zero_stage": 1, "lora": LORA}, "algorithm": {"kl": {"coef": 0.1}}},
    # One model for policy, critic, reference and average; the reference's log-probabilities enter the gradient. With an
    # adapter of the output head publications contain merged weights.
    "policy": {"policy": {"workers": 1, "lora": {**LORA, "targets": TARGETS}, "ema_decay": 0.5},
               "critic": SHARED_BACKBONE,
               "algorithm": {"kl": {"coef": 0.1, "placement": "loss", "estimator": "k3"}}},
}


@pytest.fixture(scope="module", params=["tied", "policy"])
def whole(request, configure, files, tmp_path_factory):
    """Directory of a run of 3 steps, saved after the second, and the sections it was configured with."""
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("whole") / "run"
    sections = {**SMALL, "run": {"steps": 3}, "model": {"path": str(getattr(files, request.param))},
                **KINDS[request.param]}
    ppo.run(load(PPOConfig, configure(directory, **sections), []))
    return directory, sections


@pytest.fixture
def run(whole):
    return whole[0]


@pytest.fixture
def resumed(whole, configure, tmp_path):
    """Directory of a run resumed after the second step."""
    from rlhf_ray.stages import ppo

    directory = shutil.copytree(whole[0], tmp_path / "again" / "run")
    for made_later in ("checkpoints/step_3", "model", "adapter"):
        shutil.rmtree(directory / made_later)
    ppo.run(load(PPOConfig, configure(directory, **whole[1]), []), resume=True)
    return directory


def test_generators_have_the_learners_weights(run):
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["rollout/logprob_gap"] for row in rows) < 1e-4
    assert rows[-1]["kl/sequence"] > 0.01, "weights that never changed would fit too"


@pytest.mark.parametrize("whole", ["tied"], indirect=True)
def test_a_publication_is_the_adapters_alone(run):
    adapters = sum(tensor.nbytes for tensor in load_file(run / "adapter/adapter_model.safetensors").values()) / 2**20
    assert [row["weights/published_mb"] for row in steps(run)] == [adapters] * 3


@pytest.mark.parametrize("whole", ["policy"], indirect=True)
def test_of_merged_weights_only_the_layers_with_adapters_are_published_after_the_first_time(run):
    sizes = {name: tensor.nbytes / 2**20 for name, tensor in load_file(run / "model/model.safetensors").items()}
    layers = ("q_proj", "k_proj", "v_proj", "lm_head")
    together = sum(size for name, size in sizes.items() if name.split(".")[-2] in layers)
    assert [row["weights/published_mb"] for row in steps(run)] == [sum(sizes.values()), together, together]


def test_the_frozen_base_is_the_reference(run):
    rows, evaluation = steps(run), json.loads((run / "evaluation.json").read_text())
    assert abs(rows[0]["kl/sequence"]) < 1e-4
    assert not [name for row in rows for name in row if "reference_scorer" in name]
    assert all(row["time/reference"] > 0 for row in rows)
    assert abs(evaluation["before"]["kl"]) < 1e-4 < 0.01 < evaluation["after"]["kl"]


@pytest.mark.parametrize("whole", ["tied"], indirect=True)
def test_the_resumed_run_is_the_same_run_bit_for_bit(run, resumed):
    first, again = (without(steps(directory), *CLOCKS, TRAFFIC) for directory in (run, resumed))
    assert again == first
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (run / file).read_bytes() == (resumed / file).read_bytes()


def test_the_adapters_stand_beside_the_merged_model(run):
    adapter = load_file(run / "adapter/adapter_model.safetensors")
    targets = json.loads((run / "adapter/adapter_config.json").read_text())["target_modules"]
    layers = 2 * 2 + 1 if set(targets) == set(TARGETS) else 2 * 7
    assert all(".lora_" in name for name in adapter) and len(adapter) == 2 * layers
    assert json.loads((run / "adapter/adapter_config.json").read_text())["r"] == 4
    assert not [name for name in load_file(run / "model/model.safetensors") if "lora" in name]


@pytest.mark.parametrize("whole", ["tied"], indirect=True)
def test_a_generator_that_is_replaced_gets_the_present_adapters(whole, configure, tmp_path):
    """It is killed while it samples with the adapters of the first update; responses of another model would change all
    that follows."""
    from rlhf_ray.stages import ppo

    directory, fault = tmp_path / "replaced" / "run", WorkerFault("generator/0", "generate", 1, signal.SIGKILL)
    directory.parent.mkdir()
    with worker_faults(fault):
        ppo.run(load(PPOConfig, configure(directory, **whole[1]), []))
    (event,) = read_faults(directory / "faults.jsonl")
    assert (event["role"], event["rank"], event["kind"], event["pid"]) == ("generator", 0, "died", fault.pids[0])
    assert max(row["rollout/logprob_gap"] for row in steps(directory)) < 1e-4
    assert_equal_runs(whole[0], directory)
