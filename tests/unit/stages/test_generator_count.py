"""How many generators a resumed run begins with, and the bundles that these need."""

import pytest

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.ppo_roles import load_generator_count, save_generator_count, with_generators


def config(generator=None, **pools):
    return PPOConfig(
        model={"path": "m"}, rewards={"main": {"type": "model", "path": "r"}}, prompts={"path": "p"},
        pools={"default": PoolConfig(cpus=2), **pools},
        generator={"pool": "gen" if "gen" in pools else "default", "workers": 2, "cpus": 0.5,
                   **(generator or {})})


def test_a_run_remembers_what_it_was_scaled_to(tmp_path):
    directory = RunDirectory(tmp_path)
    assert load_generator_count(directory, 2) == 2
    save_generator_count(directory, 2, 5)
    assert load_generator_count(directory, 2) == 5


def test_a_configuration_that_was_changed_since_wins(tmp_path):
    directory = RunDirectory(tmp_path)
    save_generator_count(directory, 2, 5)
    assert load_generator_count(directory, 3) == 3


@pytest.mark.parametrize("text", ["", "[1]", "{\"generators\": 3}", "{\"generators\": null, \"configured\": 2}"])
def test_a_note_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "generators.json").write_text(text)
    assert load_generator_count(RunDirectory(tmp_path), 2) == 2


def test_a_pool_has_as_many_bundles_more_as_the_generators_need():
    settings = config(gen=PoolConfig(cpus=1))
    scaled = with_generators(settings, 5)
    assert (scaled.generator.workers, scaled.pools["gen"].bundles) == (5, 3)
    assert scaled.pools["default"] == settings.pools["default"]
    assert PPOConfig.model_validate(scaled.model_dump()) == scaled, "a configuration that is sound"


def test_fewer_generators_leave_the_pool_as_it_is():
    assert with_generators(config(gen=PoolConfig(cpus=1)), 1).pools["gen"].bundles == 1
    assert with_generators(config(), 2) == config()


def test_generators_that_ipc_does_not_reach_or_that_may_not_share_a_gpu_are_refused():
    shared = config({"gpus": 0.2, "cpus": 0.1, "kv_cache_mb": 64}, gen=PoolConfig(cpus=2, gpus=1))
    alone = shared.model_copy(update={
        "policy": shared.policy.model_copy(update={"pool": "gen", "gpus": 0.5}),
        "weights": shared.weights.model_copy(update={"transport": "ipc"})})
    assert with_generators(alone, 1).generator.workers == 1
    with pytest.raises(ConfigError, match="2 generators cannot run: weights.transport=ipc .*must be one generator"):
        with_generators(alone, 2)
    by_store = alone.model_copy(update={"weights": shared.weights})
    assert with_generators(by_store, 2).pools["gen"].bundles == 1
    assert with_generators(by_store, 3).pools["gen"].bundles == 2
    unmeasured = by_store.model_copy(update={"generator": by_store.generator.model_copy(update={"kv_cache_mb": None})})
    with pytest.raises(ConfigError, match="2 generators are in one bundle.*set generator.kv_cache_mb"):
        with_generators(unmeasured, 2)
