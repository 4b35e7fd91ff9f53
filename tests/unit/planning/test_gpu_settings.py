"""Settings that nobody made, derived for the GPUs of nodes by specification."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.settled import is_set, value_at
from rlhf_ray.config.stages import PPOConfig, PreferencesStageConfig, RewardModelConfig, SFTConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.gpu_settings import derive_gpu_settings, learning_rate, machine_fields, machines_of
from rlhf_ray.planning.model_lookup import known_shape, shape_of
from rlhf_ray.planning.node_spec import parse_nodes
from rlhf_ray.planning.plan import make_plan

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"
NAMED_NODES = re.compile(r"rlhf-ray plan configs/recipes/(\S+) --nodes '?([^'\s]+)'?")
GRPO = {"model": {"path": "Qwen/Qwen3-8B"}, "prompts": {"path": "p.jsonl", "max_tokens": 1024},
        "rewards": {"right": {"type": "number"}}, "algorithm": {"estimator": "grpo"},
        "coordinator": {"samples_per_prompt": 8}, "generator": {"sampling": {"max_tokens": 1024}}}
OF_STAGES = {
    SFTConfig: {"model": {"path": "Qwen/Qwen2.5-7B"}, "data": {"path": "d.jsonl", "max_tokens": 2048}},
    RewardModelConfig: {"model": {"path": "Qwen/Qwen2.5-7B"}, "data": {"path": "d.jsonl", "max_tokens": 2048}},
    PreferencesStageConfig: {"model": {"path": "Qwen/Qwen2.5-7B"}, "prompts": {"path": "p.jsonl"}},
}


def changed(values, **sections):
    return values | {name: {**values.get(name, {}), **section} for name, section in sections.items()}


def derived(cls=PPOConfig, values=GRPO, nodes="1x8xH100", **sections):
    return derive_gpu_settings(load_values(cls, changed(values, **sections)), parse_nodes(nodes), shape_of)


def load_values(cls, values):
    """The configuration that `load` makes of a file with these values."""
    overrides = [f"--{name}={section}".replace("'", '"').replace("True", "true") for name, section in values.items()]
    return load(cls, None, overrides, has_gpus=lambda _: True)


def planned(config, nodes="1x8xH100"):
    return make_plan(config, parse_nodes(nodes), shape_of)


@cache
def recipe(name):
    text = (RECIPES / name).read_text()
    nodes = NAMED_NODES.search(text)[2]
    loaded = load(PPOConfig, RECIPES / name, [], has_gpus=lambda _: True)
    config = derive_gpu_settings(loaded, parse_nodes(nodes), shape_of)
    return text, config, planned(config, nodes)


def used_gpus(plan):
    return {(worker.node, device) for worker in plan.placement.workers for device in worker.devices}


class TestRecipes:
    """Those of configs/recipes, on the nodes that each names."""

    @pytest.mark.parametrize("name", [path.name for path in sorted(RECIPES.glob("*.yaml"))])
    def test_fits_with_room_to_spare_and_uses_all_gpus(self, name):
        text, config, plan = recipe(name)
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        assert len(lines) < 15
        assert not plan.findings
        assert all(load.share <= 0.9 for load in plan.loads)
        assert len(used_gpus(plan)) == sum(node.gpus for node in plan.nodes)
        learners = [role for role in (config.policy, config.critic) if role.gpus]
        assert {learner.autocast for learner in learners} == {config.model.dtype} == {"bfloat16"}

    def test_ppo_on_eight(self):
        _, config, _ = recipe("eight_gpu_8b_ppo.yaml")
        assert {name: pool.bundles for name, pool in config.pools.items()} == {
            "generation": 1, "scoring": 1, "policy": 3, "critic": 3}
        assert config.reference.pool == config.reward.pool == config.assembler.pool == "scoring"
        assert config.reference.gpus == config.reward.gpus == 0.5
        assert config.policy.zero_stage == 3 and config.policy.gradient_checkpointing
        assert config.policy.micro_batch_tokens == 8192 and config.rewards["preference"].dtype == "bfloat16"
        assert config.policy.optimizer.learning_rate == 1e-6 and config.weights.transport == "object_store"
        assert config.weights.bucket_mb == 256 and config.generator.chunk == 32

    def test_grpo_on_eight(self):
        _, config, _ = recipe("eight_gpu_7b_grpo.yaml")
        assert {name: pool.bundles for name, pool in config.pools.items()} == {
            "generation": 2, "scoring": 1, "policy": 5}

    def test_tools_on_eight(self):
        _, config, plan = recipe("eight_gpu_7b_tools.yaml")
        assert {name: pool.bundles for name, pool in config.pools.items()} == {"generation": 4, "policy": 4}
        assert not config.episode_runner.gpus and config.policy.micro_batch_tokens >= 12288
        assert "192 are open at the same time at most" in plan.geometry["episodes"]

    def test_seventy_billion_on_sixty_four(self):
        _, config, _ = recipe("multi_node_70b_ppo.yaml")
        assert config.generator.tensor_parallel == config.generator.gpus == config.pools["generation"].gpus == 4
        assert config.reference.shards == 4 and config.reward.shards == 1
        assert config.policy.workers > 5 * config.critic.workers
        assert config.policy.optimizer.learning_rate == 5e-7
        assert config.critic.optimizer.learning_rate == 3e-6, "which the recipe sets"
        assert config.cluster.object_store_mb == 512, "a joined cluster has its own"

    def test_one_gpu_is_shared(self):
        for name in ("one_gpu_0.5b_grpo.yaml", "one_gpu_8b_lora.yaml"):
            _, config, _ = recipe(name)
            assert list(config.pools) == ["default"] and config.pools["default"].gpus == 1
            assert config.generator.kv_cache_mb > 4096 and not config.generator.sleep_level
        assert config.policy.optimizer.learning_rate == 1e-5, "ten times that of full training"


class TestChoice:
    """Of a layout."""

    def test_an_8b_model_runs_on_all_gpus(self):
        plan = planned(derived())
        assert not plan.findings and len(used_gpus(plan)) == 8
        assert plan.step_time.seconds < 200

    def test_on_nodes_without_gpus_nothing_changes(self):
        config = load_values(PPOConfig, GRPO)
        assert derive_gpu_settings(config, parse_nodes("4x(cpus=64)"), shape_of) is config
        unknown = [replace(node, gpu=None) for node in parse_nodes("1x8xH100")]
        assert derive_gpu_settings(config, unknown, shape_of) is config

    def test_whoever_sets_pools_places_the_roles(self):
        config = load_values(PPOConfig, GRPO | {"pools": {"default": {"cpus": 8}}})
        assert derive_gpu_settings(config, parse_nodes("1x8xH100"), shape_of) is config

    def test_generators_have_their_own_gpus_where_rollouts_and_updates_overlap(self):
        config = derived(coordinator={"max_staleness": 1})
        assert {config.generator.pool, config.policy.pool} == {"generation", "policy"}
        assert config.generator.kv_cache_mb is None and not config.generator.sleep_level

    def test_a_split_that_is_chosen_is_the_fastest(self):
        config = derived(coordinator={"max_staleness": 1})
        best = planned(config).step_time.seconds
        for workers in (1, 3):
            other = derived(coordinator={"max_staleness": 1}, generator={"workers": workers})
            assert other.generator.workers == workers and planned(other).step_time.seconds > best

    def test_without_a_reference_there_is_no_scoring_pool(self):
        config = derived(algorithm={"kl": {"coef": 0}}, coordinator={"max_staleness": 1})
        assert set(config.pools) == {"generation", "policy"} and config.reward.pool == "policy"

    def test_what_fits_nowhere_is_planned_with_what_lacks(self):
        refused = planned(derived(nodes="1x1xL4"), "1x1xL4").refused
        assert any("does not fit" in text for text in refused)

    @pytest.mark.parametrize("cls", OF_STAGES)
    @pytest.mark.parametrize("nodes", ["1x1xH200", "2x8xA100"])
    def test_the_other_stages_use_all_gpus_too(self, cls, nodes):
        plan = planned(derived(cls, OF_STAGES[cls], nodes), nodes)
        assert not plan.refused and len(used_gpus(plan)) == sum(node.gpus for node in plan.nodes)

    def test_gpus_that_others_reserved_are_left_to_them(self):
        nodes = [replace(node, free={"CPU": 50.0, "GPU": 4.0}) for node in parse_nodes("1x8xH100")]
        assert machines_of(nodes).gpus == 4
        assert machines_of([replace(node, free={"CPU": 50.0}) for node in nodes]).gpus == 8, "and waited for"
        config = derive_gpu_settings(load_values(PPOConfig, GRPO), nodes, shape_of)
        assert sum(pool.bundles * pool.gpus for pool in config.pools.values()) == 4


class TestOwnPools:
    """Who places the roles gets the largest micro-batches that fit, for learners alone."""

    POOLS = {"generation": {"gpus": 1, "bundles": 2}, "policies": {"gpus": 1, "bundles": 5},
             "default": {"gpus": 1, "bundles": 1, "cpus": 8}}

    def placed(self, **policy):
        return changed(GRPO, pools=self.POOLS, generator={"gpus": 1, "workers": 2, "pool": "generation", "chunk": 8},
                       reference={"gpus": 1}, policy={"gpus": 1, "workers": 5, "pool": "policies", "zero_stage": 3,
                                                      "autocast": "bfloat16", **policy})

    @pytest.mark.parametrize("recomputed", [False, 0.5, True])
    @pytest.mark.parametrize("nodes", ["1x8xH100", "1x8xH200"])
    def test_are_the_largest_power_of_two_that_leaves_a_tenth(self, nodes, recomputed):
        given = load_values(PPOConfig, self.placed(gradient_checkpointing=recomputed))
        config = derive_gpu_settings(given, parse_nodes(nodes), shape_of)
        assert config.cluster.derived == ["policy.micro_batch_tokens"]
        chosen = config.policy.micro_batch_tokens

        def fullest(tokens):
            policy = given.policy.model_copy(update={"micro_batch_tokens": tokens})
            loads = planned(given.model_copy(update={"policy": policy}), nodes).loads
            return max(load.share for load in loads if "policy" in load.roles and load.device is not None)

        assert chosen in [2**power for power in range(11, 16)]
        assert fullest(chosen) <= (0.9 if chosen > 4096 else 1)
        assert chosen == 32768 or fullest(2 * chosen) > (0.9 if chosen >= 4096 else 1)

    def test_a_value_of_somebody_stays_and_one_of_other_machines_does_not(self):
        own = load_values(PPOConfig, self.placed(micro_batch_tokens=3000))
        assert derive_gpu_settings(own, parse_nodes("1x8xH100"), shape_of).policy.micro_batch_tokens == 3000
        given = load_values(PPOConfig, self.placed(gradient_checkpointing=0.5))
        small, large = (parse_nodes(nodes) for nodes in ("1x8xH100", "1x8xH200"))
        first = derive_gpu_settings(given, small, shape_of)
        again = derive_gpu_settings(first, large, shape_of)
        assert again == derive_gpu_settings(given, large, shape_of) != first

    def test_on_a_gpu_of_an_unknown_kind_among_others_they_are_the_default(self):
        large = parse_nodes("2x4xH200")
        nodes = [large[0], replace(large[1], gpu=None)]
        given = load_values(PPOConfig, self.placed(gradient_checkpointing=True))
        assert derive_gpu_settings(given, large, shape_of).policy.micro_batch_tokens > 4096
        assert derive_gpu_settings(given, nodes, shape_of).policy.micro_batch_tokens == 4096

    def test_gpus_that_are_too_few_leave_the_default(self):
        given = load_values(PPOConfig, self.placed())
        assert derive_gpu_settings(given, parse_nodes("1x4xH100"), shape_of) is given


class TestSetFields:
    """What somebody set is kept, and the rest completed."""

    @pytest.mark.parametrize("path", [
        "policy.workers=3", "policy.gpus=1.0", "policy.zero_stage=2", "policy.micro_batch_tokens=4096",
        "policy.autocast=float32", "policy.offload_optimizer=True", "policy.optimizer.learning_rate=3e-05",
        "generator.workers=3", "generator.tensor_parallel=2", "generator.sleep_level=1", "generator.kv_cache_mb=4000",
        "generator.max_sequences=24", "generator.gpu_memory_utilization=0.7", "generator.chunk=8",
        "reference.gpus=0.0", "policy.gpus=0.0", "model.dtype=float32", "weights.transport=nccl",
        "weights.bucket_mb=32", "cluster.object_store_mb=4096", "policy.cpus=20.0"])
    def test_a_set_field_is_never_derived(self, path):
        name, _, text = path.partition("=")
        small = changed(GRPO, model={"path": "Qwen/Qwen2.5-1.5B"})
        given = load(PPOConfig, None, [*(f"--{k}={v}".replace("'", '"') for k, v in small.items()),
                                       f"--{name}={text.lower() if text == 'True' else text}"], has_gpus=lambda _: True)
        config = derive_gpu_settings(given, parse_nodes("1x4xH100"), shape_of)
        assert str(value_at(config, name)) == text
        assert is_set(config, name) and name not in config.cluster.derived
        assert "pools" in config.cluster.derived and not planned(config, "1x4xH100").placement.shortages

    def test_what_no_layout_goes_with_is_refused_by_its_field(self):
        with pytest.raises(ConfigError, match=r"8 x H100 SXM goes with policy\.workers=12: .*place the roles yourself"):
            derived(policy={"workers": 12})
        with pytest.raises(ConfigError, match=r"policy\.pool='mine' is not one of the pools"):
            derived(policy={"pool": "mine"})

    def test_auto_is_settled_by_the_derived_placement(self):
        apart = derived(coordinator={"max_staleness": 1}, weights={"transport": "auto"})
        assert (apart.weights.transport, apart.weights.bucket_mb) == ("nccl", 1024)
        one = derived(model={"path": "Qwen/Qwen2.5-0.5B"}, nodes="1x1xH100", weights={"transport": "auto"})
        assert (one.weights.transport, one.weights.bucket_mb) == ("ipc", 1024)
        small = derived(model={"path": "Qwen/Qwen2.5-0.5B"}, nodes="1x1xH100")
        assert one.cluster.object_store_mb < small.cluster.object_store_mb, "no bucket goes through it"

    def test_what_was_derived_before_gives_way(self):
        eight = derived(coordinator={"max_staleness": 1})
        four = derive_gpu_settings(eight, parse_nodes("1x4xH200"), shape_of)
        assert four == derived(coordinator={"max_staleness": 1}, nodes="1x4xH200")
        assert "policy.optimizer.learning_rate" not in machine_fields(four)

    def test_results_that_training_depends_on_are_kept(self):
        given = load_values(PPOConfig, GRPO)
        former = derive_gpu_settings(given, parse_nodes("1x8xH100"), shape_of)
        policy = former.policy.model_copy(update={
            "optimizer": former.policy.optimizer.model_copy(update={"learning_rate": 7e-6})})
        again = derive_gpu_settings(former.model_copy(update={"policy": policy}), parse_nodes("1x8xH200"), shape_of)
        assert not is_set(again, "policy.optimizer.learning_rate")
        assert again.policy.optimizer.learning_rate == 7e-6


@pytest.mark.parametrize(("name", "rate"), [
    ("Qwen/Qwen2.5-0.5B", 5e-6), ("meta-llama/Llama-3.2-1B", 2e-6), ("Qwen/Qwen2.5-7B", 1e-6),
    ("meta-llama/Llama-3.1-8B", 1e-6), ("meta-llama/Llama-3.1-70B", 5e-7)])
def test_a_rate_falls_with_the_width(name, rate):
    assert learning_rate(1e-6, known_shape(name)) == pytest.approx(rate)


class TestIdle:
    """GPUs that no role uses are a warning."""

    def idle(self, nodes="1x8xH100", **sections):
        plan = planned(load_values(PPOConfig, changed(GRPO, **sections)), nodes)
        return [finding.text for finding in plan.findings if finding.level == "idle"]

    def test_all_of_them(self):
        (text,) = self.idle(pools={"default": {"cpus": 8}})
        assert text.startswith("8 of 8 GPUs are idle: every role is on CPUs; leave pools")

    def test_some_of_them(self):
        pools = {"default": {"cpus": 8}, "gpus": {"gpus": 1, "bundles": 5}}
        (text,) = self.idle(pools=pools, policy={"pool": "gpus", "workers": 3, "gpus": 1})
        assert text.startswith("5 of 8 GPUs are idle: no role uses them")

    def test_none(self):
        assert not self.idle("1x(cpus=8)")
        assert not [finding for finding in planned(derived()).findings if finding.level == "idle"]
