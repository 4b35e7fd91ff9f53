"""Transports between GPUs, parallel generators and turns on a shared GPU: refused where they cannot work."""

import pytest

from rlhf_ray.config.load import load, resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError

SHARED = ["--pools.default.gpus=1", "--generator.gpus=0.5", "--policy.gpus=0.4"]
APART = ["--pools.default.gpus=2", "--generator.gpus=1", "--policy.gpus=1"]
MANY = ["--pools.default.gpus=1", "--pools.default.bundles=2", "--generator.workers=2", "--policy.workers=2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--weights.transport=nccl"], ["weights.transport=nccl", "generator.gpus=0", "object_store"]),
        (["--weights.transport=ipc"], ["weights.transport=ipc", "policy.gpus=0", "object_store"]),
        ([*SHARED, "--weights.transport=nccl"], ["NCCL refuses two processes on one", "set weights.transport to auto"]),
        ([*APART, "--weights.transport=ipc"], ["within one GPU", "generator.pool=default, 1 x 1 gpus"]),
        ([*MANY, "--generator.gpus=0.5", "--policy.gpus=0.5", "--weights.transport=ipc"],
         ["a pool of one bundle with one GPU"]),
        (["--pools.default.gpus=1", "--generator.gpus=0.2", "--policy.gpus=0.4", "--generator.workers=2",
          "--generator.kv_cache_mb=64", "--weights.transport=ipc"], ["there must be one generator", "2 x 0.2 gpus"]),
        ([*APART, "--weights.transport=nccl", "--generator.engine=in_process"], ["engine=async"]),
        ([*APART, "--generator.pipeline_parallel=2"], ["pipeline_parallel=2", "2 whole gpus", "not 1"]),
        (["--generator.pipeline_parallel=2", "--generator.engine=in_process"], ["engine=async"]),
        (["--generator.pipeline_parallel=2"], ["pipeline_parallel=2 needs GPUs", "set gpus to 2"]),
        (["--generator.sleep_level=1"], ["sleep_level=1", "generator.gpus=0"]),
        (["--generator.sleep_level=3"], ["sleep_level", "at most 2"]),
        ([*SHARED, "--generator.sleep_level=1", "--coordinator.max_staleness=1"],
         ["generator.sleep_level=1", "coordinator.max_staleness=1", "set max_staleness to 0"]),
        ([*SHARED, "--policy.offload_between_phases=true", "--coordinator.max_staleness=2"],
         ["policy.offload_between_phases=true", "max_staleness=2"]),
        (["--critic.offload_between_phases=true"], ["offload_between_phases", "gpus=0"]),
        ([*APART, "--policy.offload_between_phases=true", "--policy.offload_optimizer=true"], ["set only one of them"]),
    ],
)
def test_refused_with_field_and_fix(write, overrides, words):
    with pytest.raises(ConfigError) as refused:
        load(PPOConfig, write("ppo"), overrides)
    assert not [word for word in words if word not in str(refused.value)], str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ([], "object_store"),
        (SHARED, "ipc"),
        (APART, "nccl"),
        ([*MANY, "--generator.gpus=0.5", "--policy.gpus=0.5"], "object_store"),
        ([*SHARED, "--generator.gpus=0.2", "--generator.workers=2", "--generator.kv_cache_mb=64"], "object_store"),
        (["--pools.default.gpus=2", "--policy.workers=2", "--policy.gpus=0.6", "--generator.gpus=0.2"], "object_store"),
        (["--pools.default.gpus=1", "--policy.gpus=1"], "object_store"),
        ([*APART, "--generator.engine=in_process"], "object_store"),
    ],
)
def test_auto_is_settled_by_the_placement(write, overrides, transport):
    config = load(PPOConfig, write("ppo"), [*overrides, "--weights.transport=auto", "--critic.gpus=0"])
    assert config.weights.transport == transport
    assert resolve(config) == config


@pytest.mark.parametrize(
    ("overrides", "mib"),
    [
        ([], 64),
        (["--cluster.object_store_mb=8192"], 64),
        (["--pools.default.gpus=1", "--policy.gpus=1", "--cluster.object_store_mb=8192"], 64),
        ([*APART, "--cluster.object_store_mb=8192"], 256),
        ([*APART, "--cluster.address=there:1"], 256),
        (APART, 85),
        ([*APART, "--buffer.capacity_mb=500"], 64),
        ([*APART, "--weights.transport=nccl"], 1024),
        ([*SHARED, "--weights.transport=auto"], 1024),
        ([*APART, "--weights.transport=nccl", "--weights.bucket_mb=100"], 100),
        (["--weights.bucket_mb=1"], 1),
    ],
)
def test_an_empty_bucket_size_is_that_of_the_transport_and_the_devices(write, overrides, mib):
    config = load(PPOConfig, write("ppo"), [*overrides, "--critic.gpus=0"])
    assert config.weights.bucket_mb == mib and config.weights.bucket_bytes == mib << 20
    assert resolve(config) == config


def test_the_default_works_on_any_hardware(write):
    assert load(PPOConfig, write("ppo"), APART).weights.transport == "object_store"

