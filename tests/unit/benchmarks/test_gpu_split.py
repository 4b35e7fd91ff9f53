"""How GPUs are split and how long a step then takes, on paper."""

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.cluster_model.gpu_split import (
    STALENESS,
    Split,
    best,
    publication,
    smallest_good,
    splits,
    step,
    taking_turns,
)
from rlhf_ray.planning.hardware import H100, H200
from rlhf_ray.planning.model_shape import LLAMA_70B
from rlhf_ray.planning.roofline import Engine, Workload


class TestStep:
    """The whole loop on paper."""

    WORK = Workload()

    def made(self, staleness, **changes):
        split = replace(Split(generators=64, tensor_parallel=8, learners=192, staleness=staleness), **changes)
        return step(LLAMA_70B, H100, self.WORK, split)

    def test_a_publication_reaches_each_node_once_and_pauses_for_the_last_copy(self):
        whole, pause = publication(Engine(LLAMA_70B, H100, 8))
        weights = 2 * LLAMA_70B.parameters
        assert pause == pytest.approx(weights / 8 / 50e9)
        assert whole - pause == pytest.approx(weights / (400e9 * 0.8))

    def test_without_staleness_the_sides_take_turns(self):
        now = self.made(0)
        assert now.seconds == pytest.approx(now.generation + now.training + now.publishing)

    def test_with_staleness_the_longer_side_counts(self):
        now = self.made(1)
        assert now.seconds == pytest.approx(max(now.generation + now.pause, now.scoring + now.training))
        starved = self.made(1, learners=64)
        assert starved.seconds == pytest.approx(starved.scoring + starved.training)
        assert starved.bound == "operations of training"

    def test_more_staleness_is_never_slower(self):
        seconds = [self.made(staleness).seconds for staleness in STALENESS]
        assert seconds == sorted(seconds, reverse=True)

    def test_fewer_under_way_make_the_longest_response_faster(self):
        tight, free = self.made(2, generators=128, learners=1024), self.made(4, generators=128, learners=1024)
        engine = Engine(LLAMA_70B, H100, 8)
        everything = engine.longest_s(self.WORK, 4 * 2048 / 16) / 3
        assert free.seconds < everything < tight.seconds

    def test_the_longest_response_bounds_large_clusters(self):
        assert best(LLAMA_70B, H100, self.WORK, 1024, 1).bound == "longest response"
        assert best(LLAMA_70B, H100, self.WORK, 64, 1).bound == "operations of training"

    @pytest.mark.parametrize("staleness", STALENESS)
    def test_no_doubling_gives_more_than_double(self, staleness):
        rates = [best(LLAMA_70B, H200, self.WORK, n, staleness).samples_per_second for n in (64, 128, 256, 512, 1024)]
        assert all(1 < after / before < 2.1 for before, after in pairwise(rates))

    def test_what_does_not_fit_has_no_answer(self):
        assert best(LLAMA_70B, H100, self.WORK, 16, 0) is None

    def test_splits_use_every_gpu_in_whole_engines(self):
        for split in splits(64, 1):
            assert split.generators + split.learners == 64
            assert split.generators % split.tensor_parallel == 0

    def test_taking_turns_adds_everything_up(self):
        made = taking_turns(LLAMA_70B, H100, self.WORK, 64, 8)
        assert made.seconds == pytest.approx(made.generation + made.scoring + made.training + made.publishing)

    def test_no_more_staleness_than_is_worth_it(self):
        steps = [replace(self.made(0), seconds=seconds, split=Split(8, 8, 8, staleness))
                 for staleness, seconds in ((0, 2.0), (1, 1.01), (2, 1.0))]
        assert smallest_good(steps).split.staleness == 1
        assert smallest_good(steps, within=0.0).split.staleness == 2
