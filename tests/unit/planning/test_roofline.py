"""The arithmetic of planning, by hand on small numbers, and what must hold of its answers."""

from dataclasses import replace
from math import inf

import pytest

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.planning.hardware import H100, Hardware
from rlhf_ray.planning.memory_breakdown import Memory
from rlhf_ray.planning.model_lookup import known_shape
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.roofline import Engine, Workload, gather_s
from rlhf_ray.planning.step_time import CALL_S, update_s

LLAMA_70B = known_shape("meta-llama/Llama-3.1-70B")
SMALL = ModelShape(hidden=4, layers=2, heads=2, kv_heads=1, intermediate=8, vocabulary=10)
ROUND = Hardware(name="round numbers", flops=1000.0, memory_bytes=10_000.0, memory_bandwidth=100.0, gpus_per_node=2,
                 link_bandwidth=50.0, network_bandwidth=20.0, host_bandwidth=10.0, training_share=0.5,
                 forward_share=1.0, memory_share=1.0, network_share=1.0, usable_memory=1.0, hop_s=0.0,
                 network_hop_s=0.0, collective_s=0.25, step_s=0.5)
EQUAL = Workload(samples=8, prompt=4, response=6, tail=1.0, mini_batches=2)


class TestShape:
    """Weights, operations, bytes."""

    def test_by_hand(self):
        block = 2 * 4 * 4 + 2 * 4 * 1 * 2 + 3 * 4 * 8
        assert (SMALL.multiplied, SMALL.parameters) == (2 * block + 40, 2 * block + 80) == (328, 368)
        assert replace(SMALL, tied=True).parameters == 328
        assert SMALL.weight_bytes == 736
        assert SMALL.cache_bytes == 2 * 2 * 1 * 2 * 2 == 16
        assert SMALL.token_flops(3) == 2 * 328 + 4 * 2 * 4 * 3 == 752
        assert SMALL.row_flops(6) == 6 * 752

    def test_a_scalar_head_has_no_output_matrix(self):
        assert SMALL.headless().multiplied == 328 - 40

    def test_llama_has_its_70_billion(self):
        assert LLAMA_70B.parameters == pytest.approx(70.55e9, rel=1e-3)
        assert LLAMA_70B.cache_bytes == 327_680, "320 KiB a token"


class TestWorkload:
    """Lengths."""

    @pytest.mark.parametrize("tail", [1.5, 2.0, 4.0])
    def test_the_survivor_function_has_the_mean_and_the_held_tokens_it_says(self, tail):
        work = Workload(prompt=100, response=64, tail=tail)
        places = [(i + 0.5) / 100 for i in range(int(100 * 64 * tail))]
        under_way = [work.survivors(t) for t in places]
        assert sum(under_way) / 100 == pytest.approx(64, rel=1e-3)
        held = 100 + sum(t * s for t, s in zip(places, under_way, strict=True)) / sum(under_way)
        assert work.held == pytest.approx(held, rel=1e-3)

    def test_the_longest_is_where_one_sample_is_left(self):
        work = Workload(samples=4, response=10, tail=2.0)
        assert work.longest == 15
        assert work.samples * work.survivors(work.longest) == pytest.approx(1)
        assert EQUAL.longest == 6


class TestGeneration:
    """Decoding and the cache."""

    def test_a_step_reads_weights_and_cache_or_computes(self):
        engine = Engine(SMALL, ROUND, 1)
        assert engine.decode_s(1, 8) == pytest.approx((736 + 8 * 16) / 100 + 0.5)
        slow = Engine(SMALL, replace(ROUND, flops=10.0), 1)
        assert slow.decode_s(2, 8) == pytest.approx(2 * SMALL.token_flops(8) / 10 + 0.5)

    def test_two_gpus_halve_that_and_reduce_twice_a_layer(self):
        moved = 2 * (1 / 2) * 3 * 4 * 2  # 2 (n - 1) / n of three tokens' four activations of two bytes
        expected = (736 + 3 * 8 * 16) / 200 + 2 * 2 * (0.25 + moved / 50) + 0.5
        assert Engine(SMALL, ROUND, 2).decode_s(3, 8) == pytest.approx(expected)

    def test_the_cache_has_the_room_that_weights_leave(self):
        engine = Engine(SMALL, ROUND, 1)
        assert engine.cache_tokens == (10_000 - 736) / 16 == 579
        assert engine.fitting(EQUAL) == 579 / (4 + 3)

    def test_equal_responses_take_a_step_a_token(self):
        engine = Engine(SMALL, ROUND, 1)
        assert engine.batch_s(EQUAL, 8) == pytest.approx(8 * engine.prefill_s(4) + 6 * engine.decode_s(8, 4 + 3))

    def test_what_does_not_fit_together_goes_one_after_the_other(self):
        engine = Engine(SMALL, replace(ROUND, memory_bytes=736 + 16 * 7 * 2), 1)
        assert engine.fitting(EQUAL) == 2
        assert engine.batch_s(EQUAL, 8) == pytest.approx(8 * engine.prefill_s(4) + 4 * 6 * engine.decode_s(2, 7))
        assert Engine(SMALL, replace(ROUND, memory_bytes=700.0), 1).batch_s(EQUAL, 8) == inf

    def test_no_more_sequences_than_allowed(self):
        engine = Engine(SMALL, ROUND, 1)
        assert engine.batch_s(EQUAL, 8, most=2) == pytest.approx(
            8 * engine.prefill_s(4) + 4 * 6 * engine.decode_s(2, 7))

    def test_staleness_lets_responses_span_steps(self):
        engine, work = Engine(LLAMA_70B, H100, 8), Workload()
        steps = [engine.step_s(work, 16, staleness) for staleness in (0, 1, 2, 4)]
        assert steps[0] == steps[1] == engine.batch_s(work, 16)
        assert steps[1] > steps[2] > steps[3]
        assert steps[2] >= engine.longest_s(work, 1), "a response that starts last has one step to end"

    def test_a_batch_that_runs_out_takes_longer_than_a_flow(self):
        engine, work = Engine(LLAMA_70B, H100, 8), Workload()
        assert engine.batch_s(work, 64) > 1.5 * engine.flowing_s(work, 64, 64)
        assert engine.longest_s(work, 64) == pytest.approx(work.longest * engine.decode_s(64, work.held))


class TestGathering:
    """Weights that are sharded over GPUs."""

    def test_it_is_as_slow_as_the_network_or_the_link(self):
        assert gather_s(SMALL, ROUND, 1) == 0
        assert gather_s(SMALL, ROUND, 2, 2) == pytest.approx(736 / 2 / 50), "within a node"
        assert gather_s(SMALL, ROUND, 4, 2) == pytest.approx(736 * 3 / 4 * (1 / 2) / 20), "two nodes"
        assert gather_s(SMALL, ROUND, 2) == pytest.approx(2 * 736 / 2 / 50), "float32 in training"

    def test_a_call_for_each_layer_goes_around_a_ring(self):
        slow = replace(ROUND, hop_s=1.0, network_hop_s=100.0)
        added = gather_s(SMALL, slow, 6) - gather_s(SMALL, ROUND, 6)
        assert added == pytest.approx(2 * (3 * 1 + 2 * 100)), "two layers; six GPUs on three nodes"


class TestUpdate:
    """Optimizer steps of two ranks under ZeRO-3."""

    LEARNER = Role("policy", LearnerConfig(workers=2, gpus=1, zero_stage=3, autocast="bfloat16"), (SMALL,), "",
                   lambda device: Memory())
    QUICK = replace(ROUND, memory_bandwidth=1e12)

    def seconds(self, device):
        """Of each of the two mini-batches, without the fixed cost."""
        return update_s(self.LEARNER, device, EQUAL) / 2 - CALL_S / 4

    def test_it_computes_or_communicates(self):
        assert self.seconds(self.QUICK) == pytest.approx(4 / 2 * 3 * SMALL.row_flops(10) / (1000 * 0.5))
        hasty = replace(self.QUICK, flops=1e9)
        assert self.seconds(hasty) == pytest.approx(3 * gather_s(SMALL, hasty, 2)), "in one pass over the rows"

    def test_adamw_reads_and_writes_its_shard(self):
        assert self.seconds(ROUND) - self.seconds(self.QUICK) == pytest.approx(2 * 16 * 368 / (2 * 100))
