"""Values that were filled in do not count as set, also after they were saved and read again."""

import pytest
import yaml

from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.load import as_yaml, load
from rlhf_ray.config.settled import is_set, value_at, with_derived, without_derived
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.errors import ConfigError


@pytest.fixture
def config(write):
    return load(PPOConfig, write("ppo", policy={"zero_stage": 0}), ["--generator.chunk=8"])


def test_only_what_a_layer_gives_is_set(config):
    given = [path for path in ("policy.zero_stage", "generator.chunk", "rewards.main.path") if is_set(config, path)]
    assert len(given) == 3
    for path in ("policy.workers", "pools", "generator.kv_cache_mb", "buffer.capacity_mb", "weights.transport",
                 "policy.optimizer.learning_rate", "rewards.main.dtype", "rewards.other.dtype"):
        assert not is_set(config, path), path


def test_a_default_rate_is_not_set_and_a_rate_in_python_is():
    config = PPOConfig(model={"path": "m"}, rewards={"r": {"type": "exact_match"}}, prompts={"path": "p"},
                       policy=PolicyConfig(optimizer={"learning_rate": 1e-6}))
    assert is_set(config, "policy.optimizer.learning_rate") and not is_set(config, "critic.optimizer.learning_rate")


def test_derived_values_take_no_set_field(config):
    found = with_derived(config, {"policy.zero_stage": 3, "policy.workers": 4, "rewards.main.dtype": "bfloat16"})
    assert (found.policy.zero_stage, found.policy.workers, found.rewards["main"].dtype) == (0, 4, "bfloat16")
    assert found.cluster.derived == ["policy.workers", "rewards.main.dtype"]
    assert not is_set(found, "policy.workers") and is_set(found, "policy.zero_stage")
    assert without_derived(found, found.cluster.derived) == config


def test_what_a_saved_configuration_derived_is_not_set(config, tmp_path):
    found = with_derived(config, {"policy.autocast": "bfloat16", "generator.max_sequences": 96})
    file = tmp_path / "config.yaml"
    file.write_text(as_yaml(found))
    read = load(PPOConfig, file, [])
    assert read == found and read.policy.autocast == "bfloat16"
    assert not is_set(read, "policy.autocast") and is_set(read, "policy.zero_stage")
    assert with_derived(read, {"policy.autocast": "float32"}).policy.autocast == "float32"


def test_a_layer_above_a_saved_configuration_sets_a_derived_field(config, tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text(as_yaml(with_derived(config, {"policy.autocast": "bfloat16", "critic.autocast": "bfloat16",
                                                  "policy.workers": 1})))
    monkeypatch.setenv("RLHF_RAY_CRITIC__AUTOCAST", "float32")
    read = load(PPOConfig, file, ["--policy.autocast=bfloat16"])
    assert read.cluster.derived == ["policy.workers"]
    assert is_set(read, "policy.autocast") and is_set(read, "critic.autocast")


@pytest.mark.parametrize("name", ["policy.nothing", "nothing", "run.steps.more"])
def test_a_field_that_there_is_not_has_no_value(config, name):
    with pytest.raises(LookupError):
        value_at(config, name)


class TestWithoutPools:
    """Fields that need GPUs, in a configuration that names no pools."""

    @pytest.mark.parametrize("field", [
        "policy.offload_optimizer=true", "generator.sleep_level=1", "weights.transport=nccl", "weights.transport=ipc",
        "policy.gpus=1",
        "generator.sampling.max_tokens=9000", "coordinator.prompts_per_step=40000",
        "coordinator.samples_per_prompt=5"])
    def test_are_accepted_where_there_may_be_gpus_only(self, write, field):
        with pytest.raises(ConfigError, match=field.partition("=")[0].split(".")[-1]):
            load(PPOConfig, write("ppo"), [f"--{field}"])
        found = load(PPOConfig, write("ppo"), [f"--{field}"], has_gpus=lambda _: True)
        assert "pools" in found.cluster.derived and is_set(found, field.partition("=")[0])

    @pytest.mark.parametrize("field", [
        "policy.zero_stage=2", "critic.zero_stage=2", "generator.gpu_memory_utilization=0.7"])
    def test_are_without_effect_where_there_are_no_gpus_only(self, write, field, caplog):
        load(PPOConfig, write("ppo"), [f"--{field}"], has_gpus=lambda _: True)
        assert not caplog.records
        load(PPOConfig, write("ppo"), [f"--{field}"])
        assert f"{field} [--{field.partition('=')[0]}] has no effect" in caplog.text

    def test_what_is_filled_in_for_gpus_is_no_value_without_effect(self, write, caplog):
        given = ["--policy.offload_optimizer=true", "--algorithm.estimator=reinforce"]
        found = load(PPOConfig, write("ppo"), given, has_gpus=lambda _: True)
        assert "critic.micro_batch_tokens" in found.cluster.derived and not caplog.records

    def test_are_refused_with_pools_and_when_they_never_work(self, write):
        cases = (["--policy.offload_optimizer=true", "--pools.default.cpus=4"], ["--policy.offload_optimizer=maybe"])
        for given in cases:
            with pytest.raises(ConfigError, match="policy"):
                load(PPOConfig, write("ppo"), given, has_gpus=lambda _: True)

    def test_of_a_cluster_its_address_is_asked(self, write):
        asked = []
        load(SFTConfig, write("sft"), ["--learner.offload_optimizer=true", "--cluster.address=there:1"],
             has_gpus=lambda address: asked.append(address) or True)
        assert asked == ["there:1"]

    def test_nothing_is_asked_of_a_configuration_that_works(self, write):
        load(SFTConfig, write("sft"), [], has_gpus=lambda _: pytest.fail("asked"))


def test_a_written_configuration_is_plain_yaml(config):
    values = yaml.safe_load(as_yaml(with_derived(config, {"policy.workers": 2})))
    assert values["cluster"]["derived"] == ["policy.workers"] and values["policy"]["workers"] == 2


def test_a_list_that_names_no_field_is_refused(write):
    with pytest.raises(ConfigError, match=r"cluster\.derived names 'policy\.speed', which is no field"):
        load(PPOConfig, write("ppo", cluster={"derived": ["policy.speed"]}), [])
