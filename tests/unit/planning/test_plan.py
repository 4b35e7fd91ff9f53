"""Plans: what is counted, what is refused and with which way out, and that placed roles fit the machines they name."""

import json
import re
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest

from rlhf_ray.cli.plan_report import plan_as_json, plan_as_values
from rlhf_ray.config.learner import SHARDED_BUCKET, LearnerConfig, PolicyConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig, ScorerConfig
from rlhf_ray.planning.activations import MicroBatch, layer_bytes
from rlhf_ray.planning.inference_memory import scorer_memory
from rlhf_ray.planning.learner_memory import Training, learner_memory
from rlhf_ray.planning.memory_breakdown import BUFFERS, GIB
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.node_spec import parse_nodes
from rlhf_ray.planning.plan import make_plan
from rlhf_ray.planning.roofline import Workload
from rlhf_ray.planning.step_time import workload_of

PLACED = Path(__file__).parent / "placed"
"""Configurations whose roles are placed by pools, with the nodes that they are for in a comment."""
SMALL = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocabulary=320)
LARGE = ModelShape(hidden=1024, layers=2, heads=8, kv_heads=8, intermediate=2048, vocabulary=320)
NAMED_NODES = re.compile(r"rlhf-ray plan tests/unit/planning/placed/(\S+) --nodes '?([^'\s]+)'?")


def planned(name, nodes, *overrides):
    return make_plan(load(PPOConfig, PLACED / name, list(overrides)), parse_nodes(nodes), shape_of)


def recipes():
    """Each configuration with the nodes that its own comment names."""
    return [pytest.param(*match.groups(), id=match[1]) for path in sorted(PLACED.glob("*.yaml"))
            for match in [NAMED_NODES.search(path.read_text())] if match]


class TestPlaced:
    """Configurations with pools of their own."""

    def test_each_names_its_nodes(self):
        assert {param.id for param in recipes()} == {path.name for path in PLACED.glob("*.yaml")}
        assert len(recipes()) == 6

    @pytest.mark.parametrize(("name", "nodes"), recipes())
    def test_fits_the_nodes_it_names_with_room_to_spare(self, name, nodes):
        plan = planned(name, nodes)
        assert not plan.findings
        assert all(load.share < 0.9 for load in plan.loads)
        assert len(plan.placement.workers) == sum(role.placement.workers for role in plan.roles)

    def test_a_minimum_length_takes_a_second_copy_of_logits_and_top_k_takes_none(self):
        def logits(*sampling):
            options = [f"--generator.sampling.{option}" for option in sampling]
            memory = planned("one_gpu_0.5b_grpo.yaml", "1x1xL40S", *options).memory
            return {role: memory[role].shown["logits"] for role in ("policy", "reference")}

        plain, copied = logits(), logits("min_tokens=8")
        assert all(copied[role] > 1.2 * plain[role] for role in plain)
        assert logits("min_tokens=8", "top_k=50") == plain

    def test_roles_of_the_large_one_keep_to_their_nodes(self):
        [nodes] = [param.values[1] for param in recipes() if "70b" in param.id]
        plan = planned("multi_node_70b_ppo.yaml", nodes)
        labels = {node.name: node.labels["role"] for node in plan.nodes}
        where = {(worker.role, labels[worker.node]) for worker in plan.placement.workers}
        assert where == {("generator", "generation"), ("policy", "policy"), ("critic", "judges"),
                         ("reference", "judges"), ("reward", "judges"), ("assembler", "judges"),
                         ("prompt_reader", "judges")}


    def test_what_the_first_rank_gathers_is_counted_on_its_node_alone(self):
        [nodes] = [param.values[1] for param in recipes() if "70b" in param.id]
        plan = planned("multi_node_70b_ppo.yaml", nodes)
        first, *others = [load for load in plan.loads
                          if load.device is None and {"policy/0", "policy/8"} & load.holders.keys()]
        assert plan.memory["policy"].host_bytes < plan.roles[0].models[0].weight_bytes / 2
        assert sum(first.holders["policy/0"].values()) > plan.roles[0].models[0].weight_bytes
        assert [sum(other.holders["policy/8"].values()) for other in others] == [plan.memory["policy"].host_bytes]


def test_an_evaluation_s_plan_says_nothing_of_training():
    config = load(EvaluateConfig, PLACED / "one_gpu_0.5b_grpo.yaml", [])
    plan = make_plan(config, parse_nodes("1x1xH100"), shape_of)
    assert list(plan.geometry) == ["samples"] and plan_as_values(plan)["method"] is None
    assert planned("one_gpu_0.5b_grpo.yaml", "1x1xH100").geometry["weights"]


class TestEpisodes:
    """What episodes take, by hand."""

    def plan(self, *overrides):
        return planned("eight_gpu_7b_tools.yaml", "1x8xH100", *overrides)

    @pytest.mark.parametrize(("override", "processes"), [
        ("--environments.tools.processes=4", 4), ("--environments.tools.isolated=true", 96),
        ("--environments.tools={path: null, command: [sh, agent.sh]}", 96)])
    def test_a_runner_is_a_process_with_those_of_its_environments(self, override, processes):
        plan = self.plan(override)
        assert plan.memory["episode_runner"].host == {
            "runtime": 350 * 2**20, "environments": (processes * 25 + 220) * 2**20}
        assert ("a process each" if processes == 96 else "which share 4 processes") in plan.geometry["episodes"]

    def test_turns_tokens_and_open_episodes_are_named(self):
        text = self.plan().geometry["episodes"]
        assert "up to 12 turns of up to 1024 tokens, 12288 in all, 96 open in each runner" in text
        assert text.endswith("2 runners, so 192 are open at the same time at most")  # of 4 x 2 x 64 in flight
        assert "512 episodes of up to 12288 tokens" in self.plan().geometry["batch"]

    def test_a_cache_that_holds_less_than_half_of_the_open_episodes_is_tight(self):
        # 57344 bytes a token (keys, values; 28 layers, 4 heads of 128; bfloat16): 20000 MiB hold 29.8 episodes
        findings = self.plan("--generator.kv_cache_mb=20000", "--environments.tools.concurrency=256").findings
        assert any("holds 30 episodes of environments.tools.max_tokens=12288 tokens, and 128 may be open"
                   in finding.text for finding in findings)
        assert not self.plan().findings

    def test_a_turn_is_prefilled_with_what_is_new_or_with_all_before_it(self):
        work = Workload(samples=1, prompt=10, response=12, read=6, turns=3)
        assert work.row == 28 and work.prefills == [16]
        assert replace(work, prefix_cached=False).prefills == [10, 16, 22]
        assert Workload(prompt=10).prefills == [10]

    def test_time_is_of_half_the_turns_and_tokens(self):
        config = load(PPOConfig, PLACED / "eight_gpu_7b_tools.yaml", [])
        work = workload_of(config)
        # 6 turns of 512 tokens; 12288 / 2 - 512 - 3072 are read
        assert (work.turns, work.prompt, work.response, work.read) == (6, 512, 3072, 2560)
        assert work.prefix_cached and not workload_of(load(PPOConfig, PLACED / "eight_gpu_7b_tools.yaml", [
            "--generator.vllm.enable_prefix_caching=false"])).prefix_cached


class TestShardedScorer:
    """Bytes of one rank with a shard of a frozen model."""

    def memory(self, **fields):
        shape = ModelShape(hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, vocabulary=128256,
                           saved_bytes=2)
        return shape, scorer_memory(ScorerConfig(workers=4, micro_batch_tokens=64, **fields), shape, 8, 32, 0.5)

    def test_weights_are_divided_and_what_is_gathered_is_counted(self):
        shape, whole = self.memory(gpus=1)
        _, sharded = self.memory(gpus=1, shards=4)
        assert whole.device["weights"] == shape.weight_bytes and "buffers" not in whole.device
        assert sharded.device["weights"] == shape.weight_bytes / 4
        kept = 1e9 + shape.layer_parameters  # `stage3_max_live_parameters`, and a layer as it arrives
        assert sharded.device["buffers"] == kept * shape.bytes_per_value
        assert sharded.device["activations"] == whole.device["activations"], "two rows for each rank"

    def test_weights_of_another_precision_lie_whole_in_main_memory_while_they_are_loaded(self):
        shape, mapped = self.memory(gpus=1, shards=4)
        other = replace(shape, saved_bytes=4)
        config = ScorerConfig(workers=4, shards=4, micro_batch_tokens=64, gpus=1)
        converted = scorer_memory(config, other, 8, 32, 0.5)
        assert mapped.host["weights"] == shape.weight_bytes / 4
        assert converted.host["weights"] + converted.host["buffers"] == shape.weight_bytes + 4 * shape.parameters

    def test_the_report_names_copies_and_shards(self):
        [nodes] = [param.values[1] for param in recipes() if "70b" in param.id]
        plan = planned("multi_node_70b_ppo.yaml", nodes)
        assert plan.geometry["reference"].endswith("; 2 copies of 4 shards (ZeRO 3)") and "reward" not in plan.geometry
        few = planned("multi_node_70b_ppo.yaml", nodes, "--generator.chunk=1")
        assert few.step_time.roles["reference"] > 2 * plan.step_time.roles["reference"], "gathered each call"


class TestLearner:
    """Bytes of one rank, by hand."""

    def parts(self, **changes):
        config = LearnerConfig(gpus=1, micro_batch_tokens=64, **changes)
        return learner_memory(config, Training(SMALL, 32, 1.0, 64)).device

    @pytest.mark.parametrize(("stage", "workers", "weights", "gradients", "optimizer"), [
        (1, 1, 4, 4, 8), (0, 2, 4, 4, 8), (1, 2, 6, 4, 4), (2, 2, 6, 2, 4), (3, 2, 4, 2, 4), (3, 4, 2, 1, 2)])
    def test_zero_stages_share_out_what_they_say(self, stage, workers, weights, gradients, optimizer):
        parts, number = self.parts(zero_stage=stage, workers=workers), SMALL.parameters
        assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (
            weights * number, gradients * number, optimizer * number)

    def test_adapters_have_state_and_the_base_has_none(self):
        parts = self.parts(lora={"rank": 2})
        attention, forward = 2 * (64 + 64) + 2 * (64 + 32), 3 * (64 + 96)
        adapters = 2 * 2 * (attention + forward)
        assert parts["gradients"] == 4 * adapters
        assert parts["weights"] == 4 * adapters + 2 * SMALL.parameters

    def test_offloaded_moments_lie_in_main_memory(self):
        config = LearnerConfig(gpus=1, workers=2, zero_stage=2, offload_optimizer=True, micro_batch_tokens=64)
        memory = learner_memory(config, Training(SMALL, 32, 1.0, 64))
        number = SMALL.parameters
        assert "optimizer" not in memory.device and memory.device["weights"] == 4 * number
        assert "optimizer" not in memory.in_rollouts and memory.in_rollouts["weights"] == 4 * number
        kept = [memory.host[part] for part in ("optimizer", "weights", "gradients")]
        assert kept == [8 * number / 2, 4 * number / 2, 4 * number / 2]

    def test_moments_that_are_put_aside_between_phases_lie_in_main_memory_then(self):
        config = PolicyConfig(gpus=1, offload_between_phases=True, micro_batch_tokens=64)
        memory = learner_memory(config, Training(SMALL, 32, 1.0, 64))
        assert memory.device["optimizer"] == memory.host["optimizer"] == 8 * SMALL.parameters
        assert "optimizer" not in memory.in_rollouts and memory.in_rollouts["weights"] == memory.device["weights"]
        assert 0 < memory.in_rollouts["activations"] < memory.device["activations"], "a pass without gradients"
        assert 0 < memory.in_rollouts["logits"] < memory.device["logits"]
        whole = learner_memory(PolicyConfig(gpus=1, micro_batch_tokens=64), Training(SMALL, 32, 1.0, 64))
        assert whole.in_rollouts["optimizer"] == 8 * SMALL.parameters

    def test_ranks_that_share_the_weights_never_have_them_whole_but_for_the_first_one_s_export(self):
        def main_memory(stage):
            config = LearnerConfig(gpus=1, workers=8, zero_stage=stage, micro_batch_tokens=64)
            held = learner_memory(config, Training(LARGE, 32, 1.0, 64, bucket_bytes=1.0))
            return [sum(amount for part, amount in parts.items() if part != "runtime")
                    for parts in (held.host, held.first)]

        assert main_memory(2) == [4 * LARGE.parameters] * 2
        assert main_memory(3) == [12 * LARGE.parameters / 8, 3 + LARGE.weight_bytes]

    def test_what_deepspeed_holds_at_stage_3_on_cpus(self):
        number = LARGE.parameters
        config = LearnerConfig(workers=2, zero_stage=3, micro_batch_tokens=64)
        host = learner_memory(config, Training(LARGE, 32, 1.0, 64)).host
        assert (host["weights"], host["gradients"], host["optimizer"]) == (4 * number, 2 * number, 4 * number)
        assert number > SHARDED_BUCKET
        assert host["buffers"] == 3 * 4 * SHARDED_BUCKET + 4 * (number + LARGE.layer_parameters)

    def test_stage_2_has_two_buckets_of_which_each_holds_the_largest_parameter(self):
        def buffers(shape, **changes):
            config = LearnerConfig(gpus=1, workers=2, zero_stage=2, micro_batch_tokens=64, **changes)
            return learner_memory(config, Training(shape, 32, 1.0, 64)).device["buffers"]

        wide = replace(SMALL, vocabulary=2**20)
        assert buffers(SMALL) == 2 * 4 * SHARDED_BUCKET
        assert buffers(wide) == 2 * 4 * 2**20 * SMALL.hidden > buffers(SMALL)
        assert buffers(wide, lora={"rank": 2}) == buffers(SMALL)

    def test_checkpointing_and_half_precision_keep_less(self):
        whole, again = self.parts(), self.parts(gradient_checkpointing=True)
        assert again["activations"] < whole["activations"]
        assert self.parts(autocast="bfloat16")["logits"] < whole["logits"]

    def test_a_share_of_layers_that_are_recomputed_keeps_the_others_and_one_more(self):
        deep = replace(SMALL, layers=8)
        kept, *others = (learner_memory(LearnerConfig(gpus=1, micro_batch_tokens=64, gradient_checkpointing=share),
                                        Training(deep, 32, 1.0, 64)).device["activations"]
                         for share in (False, 0.25, 0.5, 0.75, True))
        each = layer_bytes(deep, MicroBatch(64, 32, on_gpu=True, compiled=True))
        inputs = deep.hidden * 4
        assert others == [kept - 64 * ((recomputed - 1) * each - recomputed * inputs) for recomputed in (2, 4, 6, 8)]

    def test_a_batch_of_few_rows_is_no_full_micro_batch(self):
        config = LearnerConfig(micro_batch_tokens=4096, workers=2)
        few, full = (learner_memory(config, Training(SMALL.headless(), 32, 0.0, rows)).host for rows in (64, 256))
        assert full["activations"] == 4 * few["activations"]

    def test_all_gradients_lie_beside_activations_from_the_second_micro_batch_on(self):
        config = LearnerConfig(micro_batch_tokens=16384)
        one, two = (learner_memory(config, Training(SMALL, 256, 1.0, rows)).host for rows in (64, 128))
        assert (one["gradients"], two["gradients"]) == (2 * SMALL.parameters, 4 * SMALL.parameters)

    def test_main_memory_holds_a_copy_to_save_where_that_is_more_than_a_pass(self):
        host = learner_memory(LearnerConfig(micro_batch_tokens=64), Training(LARGE, 32, 1.0, 64)).host
        assert host["checkpoint copies"] == 12 * LARGE.parameters
        assert "activations" not in host

    def test_twice_the_tokens_take_twice_the_activations(self):
        one, two = (learner_memory(LearnerConfig(micro_batch_tokens=tokens), Training(SMALL.headless(), 256, 0.0, 64)
                                   ).host for tokens in (4096, 8192))
        assert two["activations"] == pytest.approx(2 * one["activations"])


class TestVerdict:
    """What is refused, and what would help."""

    def test_a_gpu_that_is_too_small_is_told_with_the_fields_that_mend_it(self):
        plan = planned("one_gpu_0.5b_grpo.yaml", "1x1xL4", "--policy.gradient_checkpointing=false")
        [refusal] = plan.refused
        assert re.match(r"policy does not fit: node-0 GPU 0 \(L4\) lacks [\d.]+ GiB\. To fit, set "
                        r"policy\.gradient_checkpointing=true\. .* of 22.4 GiB .*activations", refusal)
        assert not planned("one_gpu_0.5b_grpo.yaml", "1x1xL4").refused, "as it says"

    @pytest.mark.parametrize(("recipe", "nodes", "worse", "needed"), [
        ("one_gpu_8b_lora.yaml", "1x1xH100", ["--policy.gradient_checkpointing=false"], 1),
        ("one_gpu_8b_lora.yaml", "1x1xH100", ["--generator.kv_cache_mb=60000"], 1),
        ("eight_gpu_8b_ppo.yaml", "1x8xH100", ["--critic.zero_stage=1", "--critic.gradient_checkpointing=false",
                                               "--critic.autocast=float32"], 2),
    ])
    def test_the_advice_is_what_is_needed_and_no_more(self, recipe, nodes, worse, needed):
        [refusal] = planned(recipe, nodes, *worse).refused
        advice = re.findall(r"(\w+\.\w+=\w+(?:\.\d+)?)", refusal.partition("To fit, set ")[2])
        assert len(advice) >= needed
        assert not planned(recipe, nodes, *worse, *(f"--{change}" for change in advice)).refused
        for left_out in advice:
            rest = [f"--{change}" for change in advice if change != left_out]
            assert planned(recipe, nodes, *worse, *rest).refused, f"{left_out} is not needed"

    def test_roles_on_gpus_of_their_own_are_told_apart(self):
        worse = ["--policy.micro_batch_tokens=65536", "--critic.micro_batch_tokens=131072"]
        critic, policy = planned("eight_gpu_8b_ppo.yaml", "1x8xH100", *worse).refused
        for role, refusal in (("critic", critic), ("policy", policy)):
            assert refusal.startswith(f"{role} does not fit") and "as do 2 more like it" in refusal
            assert f"To fit, set {role}.micro_batch_tokens=16384. " in refusal
        assert not planned("eight_gpu_8b_ppo.yaml", "1x8xH100", "--policy.micro_batch_tokens=16384",
                           "--critic.micro_batch_tokens=16384").refused

    @pytest.mark.parametrize("nodes", ["1x(cpus=64,memory=16)", "1x(gpus=1,gpu=H100,cpus=16,memory=24)"])
    def test_an_object_store_is_made_no_smaller_than_it_must_be(self, nodes):
        large = "--cluster.object_store_mb=61440"
        advice = [re.findall(r"To fit, set cluster\.object_store_mb=(\d+)\. ", text)
                  for text in planned("one_gpu_0.5b_grpo.yaml", nodes, large).refused]
        [[size]] = [found for found in advice if found]
        assert int(size) > 2000
        rest = planned("one_gpu_0.5b_grpo.yaml", nodes, f"--cluster.object_store_mb={size}").findings
        assert not any("does not fit" in f.text or f.text.startswith("the object store of") for f in rest)

    def test_a_node_without_gpus_has_no_endless_memory(self):
        plan = planned("eight_gpu_8b_ppo.yaml", "1x(cpus=64,memory=64)")
        assert plan.refused and all(isfinite(memory.device_bytes) for memory in plan.memory.values())
        json.loads(plan_as_json(plan), parse_constant=pytest.fail)

    def test_what_no_field_mends_says_so(self):
        plan = planned("one_gpu_8b_lora.yaml", "1x1xL4")
        assert "smaller model" in plan.refused[0]

    @pytest.mark.parametrize(("recipe", "nodes", "worse", "role", "field"), [
        ("one_gpu_8b_lora.yaml", "1x1xH100", "--generator.kv_cache_mb=60000", "generator", "generator.kv_cache_mb="),
        ("eight_gpu_8b_ppo.yaml", "1x8xH100", "--critic.zero_stage=1", "critic", "critic.zero_stage=3"),
        ("multi_node_70b_ppo.yaml", "2x8xH100(label=role:generation)+5x8xH100(label=role:policy)+"
         "2x8xH100(label=role:judges)", "--reference.shards=1", "reference", "reference.shards=2"),
    ])
    def test_the_role_whose_memory_is_the_problem_comes_first_then_what_to_set(self, recipe, nodes, worse, role, field):
        refusal = planned(recipe, nodes, worse).refused[0]
        kind = nodes.rpartition("x")[2].partition("(")[0]
        assert re.match(rf"{role} does not fit: node-\d GPU \d \({kind}[^)]*\) lacks [\d.]+ GiB", refusal)
        assert field in refusal

    def test_too_few_gpus(self):
        plan = planned("eight_gpu_8b_ppo.yaml", "1x4xH100")
        assert any("pools.policy" in text or "pools.critic" in text for text in plan.refused)
        assert plan.step_time is None

    def test_a_cache_below_one_sequence_is_refused_and_one_that_holds_few_is_tight(self):
        plan = planned("one_gpu_8b_lora.yaml", "1x1xH100", "--generator.kv_cache_mb=128")
        assert any("generator.kv_cache_mb to 192 at least" in text for text in plan.refused)
        tight = planned("one_gpu_8b_lora.yaml", "1x1xH100", "--generator.kv_cache_mb=2048")
        [told] = [finding.text for finding in tight.findings if "holds 11 longest sequences" in finding.text]
        assert "lower generator.max_sequences to 10, or raise generator.kv_cache_mb" in told
        assert not tight.refused

    @pytest.mark.parametrize(("share", "told"), [(0.02, "none of 24 layers; set it to false"), (0.05, None),
                                                 (0.98, "all of 24 layers; set it to true")])
    def test_a_share_of_layers_that_is_none_or_all_of_them_is_told(self, share, told):
        plan = planned("one_gpu_0.5b_grpo.yaml", "1x1xH100", f"--policy.gradient_checkpointing={share}")
        shares = [finding.text for finding in plan.findings if "gradient_checkpointing" in finding.text]
        assert shares == ([f"policy.gradient_checkpointing={share} recomputes {told}, or to a multiple of 1/24"]
                          if told else [])

    def test_full_precision_on_a_gpu_is_told(self):
        plan = planned("one_gpu_0.5b_grpo.yaml", "1x1xH100", "--policy.autocast=float32", "--model.dtype=float32")
        told = " ".join(finding.text for finding in plan.findings)
        assert "policy.autocast=float32" in told and "reference holds its model in float32" in told

    def test_main_memory_counts_too(self):
        plan = planned("one_gpu_0.5b_grpo.yaml", "1x1xL40S(memory=16)")
        assert any("node-0 memory" in text for text in plan.refused)

    def test_a_full_disk(self):
        config = load(PPOConfig, PLACED / "one_gpu_0.5b_grpo.yaml", [])
        plan = make_plan(config, parse_nodes("1x1xL40S"), shape_of, free_disk=float(GIB))
        assert any("checkpoint.keep" in text for text in plan.refused)


    def test_an_object_store_below_three_buckets_is_tight_unless_weights_go_from_gpu_to_gpu(self):
        small = ("one_gpu_8b_lora.yaml", "1x1xH100", "--cluster.object_store_mb=512")
        arguments = (*small, '--policy.lora.targets=["q_proj","lm_head"]')  # so that publications contain weights
        assert not planned(*small).findings
        assert any("cluster.object_store_mb" in finding.text for finding in planned(*arguments).findings)
        direct = planned(*arguments, "--weights.transport=ipc")
        assert not direct.findings
        assert direct.memory["generator"].host_bytes < planned(*arguments).memory["generator"].host_bytes

    def test_buckets_between_gpus_are_counted_on_them(self):
        def held(*arguments):
            plan = planned("eight_gpu_8b_ppo.yaml", "1x8xH100", *arguments)
            return {name: plan.memory[name].device[BUFFERS] for name in ("policy", "generator")}

        small, large = (held("--weights.transport=nccl", f"--weights.bucket_mb={mib}") for mib in (2048, 3072))
        through_memory = held("--weights.transport=object_store", "--weights.bucket_mb=2048")
        # Two are kept by the learner while the next is gathered; vLLM keeps the one before.
        assert large["policy"] - small["policy"] == 3 * GIB and large["generator"] - small["generator"] == 2 * GIB
        assert small["policy"] - through_memory["policy"] == 6 * GIB

    def test_a_sequence_longer_than_the_context_of_the_model_is_refused(self):
        def plan(context):
            config = load(PPOConfig, PLACED / "one_gpu_8b_lora.yaml", [])
            return config, make_plan(config, parse_nodes("1x1xH100"),
                                     lambda model, field: replace(shape_of(model, field), context=context))

        config, short = plan(64)
        longest = config.prompts.max_tokens + config.generator.sampling.max_tokens
        said = rf"= {longest} tokens is over the context of .*, 64; lower"
        assert any(re.search(said, text) for text in short.refused)
        assert not plan(longest)[1].refused and not plan(None)[1].refused

    def test_roles_that_take_turns_need_the_larger_of_the_two(self):
        combined_memory = planned("one_gpu_8b_lora.yaml", "1x1xH100")
        turns = planned("one_gpu_8b_lora.yaml", "1x1xH100", "--generator.sleep_level=1",
                        "--policy.offload_between_phases=true")
        gpu, in_turns = (next(load for load in plan.loads if load.device == 0) for plan in (combined_memory, turns))
        parts = {name: sum(held.values()) for name, held in gpu.holders.items()}
        assert in_turns.bytes < gpu.bytes
        assert set(in_turns.holders["policy/0"]) >= {"weights"}, "moments go, weights stay"
        assert in_turns.bytes >= max(parts.values())
        scoring = {name: sum(held.in_rollouts.values()) for name, held in turns.memory.items() if held.in_rollouts}
        drawing = scoring["policy"] + turns.memory["generator"].device_bytes
        assert in_turns.bytes >= drawing, "learners score while generators are awake"


class TestRest:
    """Disk, time, geometry, JSON."""

    def test_checkpoints_hold_twelve_bytes_a_weight_and_one_more_is_written(self):
        plan = planned("one_gpu_0.5b_grpo.yaml", "1x1xL40S")
        one = 12 * plan.roles[0].models[0].parameters
        assert plan.disk["3 checkpoints kept"] == 3 * one, "two and the best"
        assert plan.disk["one being written"] == one

    def test_a_slower_gpu_takes_longer(self):
        fast, slow = (planned("one_gpu_0.5b_grpo.yaml", nodes).step_time for nodes in ("1x1xH100", "1x1xL40S"))
        assert fast.seconds < slow.seconds
        assert fast.bottleneck in fast.roles
        assert fast.samples == 512

    def test_overlapping_sides_take_as_long_as_the_longer(self):
        apart = planned("eight_gpu_8b_ppo.yaml", "1x8xH100", "--coordinator.max_staleness=0").step_time.seconds
        assert planned("eight_gpu_8b_ppo.yaml", "1x8xH100").step_time.seconds < apart

    def test_roles_on_one_gpu_take_turns(self):
        shared = planned("eight_gpu_8b_ppo.yaml", "1x8xH100", "--pools.generation.bundles=3", "--generator.workers=3",
                         "--pools.policy.bundles=2", "--policy.workers=2", "--pools.critic.bundles=2",
                         "--critic.workers=2", "--coordinator.max_staleness=0").step_time
        roles = shared.roles
        rollouts, learning = roles["reference"] + roles["reward"], max(roles["policy"], roles["critic"])
        assert rollouts > roles["generator"]
        assert shared.seconds == pytest.approx(rollouts + learning + roles["publication"])

    def test_no_update_is_faster_than_its_longest_row(self):
        few, many = (planned("multi_node_70b_ppo.yaml", "24x8xH100(label=role:policy)+16x8xH100(label=role:generation)"
                             "+2x8xH100(label=role:judges)", "--coordinator.prompts_per_step=512",
                             f"--pools.policy.bundles={n}", f"--policy.workers={n}").step_time for n in (64, 128))
        assert many.roles["policy"] > 0.7 * few.roles["policy"], "128 rows: one is twice the mean"

    def test_the_coordinator_bounds_steps_of_very_many_samples(self):
        work = Workload(samples=1_000_000, prompt=1, response=1, tail=1.0)
        config = load(PPOConfig, PLACED / "eight_gpu_7b_grpo.yaml", [])
        step = make_plan(config, parse_nodes("1x8xH100"), shape_of, work=work).step_time
        assert step.roles["coordinator"] == pytest.approx(400)
        assert step.seconds >= 400

    def test_a_publication_sends_a_copy_to_each_other_node(self):
        [nodes] = [param.values[1] for param in recipes() if "70b" in param.id]
        two = planned("multi_node_70b_ppo.yaml", nodes).step_time.roles["publication"]
        weights = 2 * 70.55e9
        assert two == pytest.approx(2 * weights / (50e9 * 0.8) + weights / 4 / 50e9, rel=1e-3)

    def test_adapters_alone_are_a_small_part_of_the_weights(self):
        """Rank 16 in bfloat16 on an 8B Llama (Hu et al. 2021: rank x (inputs + outputs) of each matrix)."""
        alone = planned("one_gpu_8b_lora.yaml", "1x1xH100")
        merged = planned("one_gpu_8b_lora.yaml", "1x1xH100", "--policy.lora.rank=513")
        layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
        assert alone.geometry["weights"].startswith(f"{2 * 16 * 32 * layer / 2**20:.0f} MiB")
        assert "the adapters alone, 0.52%" in alone.geometry["weights"]
        assert "merged in, because policy.lora.rank=513" in merged.geometry["weights"]
        assert alone.step_time.roles["publication"] < 0.01 * merged.step_time.roles["publication"]

    def test_values_are_plain_and_whole(self):
        import json

        values = plan_as_values(planned("one_gpu_8b_lora.yaml", "1x1xH100"))
        assert json.loads(json.dumps(values)) == values
        assert values["fits"] is True
        assert values["roles"]["policy"]["device_bytes"]["weights"] > 16e9
        assert values["step"]["bottleneck"] in values["step"]["roles_seconds"]
