"""Batches of the supervised stages, and which tokens carry loss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.stepwise_format import StepTokens
from rlhf_ray.data.stepwise_supervision import StepRows
from rlhf_ray.data.supervised_records import Pairs, Sequences
from rlhf_ray.records import offsets_of
from rlhf_ray.roles import supervised_learner
from rlhf_ray.roles.supervised_learner import (
    ProcessRewardLearner,
    RewardModelLearner,
    SupervisedLearner,
    predictable,
)


def sequences(lengths, mask=None):
    tokens = np.arange(sum(lengths), dtype=np.int32)
    loss_mask = np.ones(len(tokens), dtype=bool) if mask is None else np.array(mask, dtype=bool)
    return Sequences(offsets=offsets_of(lengths), tokens=tokens, loss_mask=loss_mask)


class RowRecorder(SupervisedLearner):
    """A learner without a model that says which rows an update was made on: each is one token, its number."""

    engine = SimpleNamespace(
        count_update=lambda applied: None,
        step=lambda: SimpleNamespace(applied=True, grad_norm=0.0, learning_rate=0.0))

    def shares(self, mini_batch, loss, meter):
        self.rows = mini_batch.tokens.tolist()
        return []

    def rows_of(self, step):
        self.update(step)
        return self.rows


def learner(rows, batch_size, seed=4, rank=0, world=1):
    recorder = RowRecorder(LearnerConfig(), ModelConfig(path="unused"), rank, world, seed, 10, batch_size)
    recorder.take(sequences([1] * rows), sequences([]))
    return recorder


def test_every_row_comes_once_an_epoch_and_batches_reach_into_the_next():
    it = learner(rows=10, batch_size=4)
    rows = [row for step in range(1, 6) for row in it.rows_of(step)]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]


@pytest.mark.parametrize("resume_at", [1, 3, 7])
def test_a_resumed_learner_goes_on_with_the_same_batches(resume_at):
    whole, resumed = learner(10, 4), learner(10, 4)
    expected = [whole.rows_of(step) for step in range(1, 10)]
    assert [resumed.rows_of(step) for step in range(resume_at, 10)] == expected[resume_at - 1 :]


def test_going_back_gives_the_same_batches_again():
    it = learner(10, 4)
    first = [it.rows_of(step) for step in (1, 2, 3)]
    assert [it.rows_of(step) for step in (1, 2, 3)] == first
    assert it.rows_of(2) == first[1]


def test_all_ranks_agree_on_the_batch_and_another_seed_does_not():
    one, two = learner(50, 8, rank=0, world=2), learner(50, 8, rank=1, world=2)
    assert one.rows_of(3) == two.rows_of(3)
    assert one.rows_of(3) != learner(50, 8, seed=5).rows_of(3)


def test_batches_of_a_mix_follow_the_weights_and_resume():
    def mixed():
        made = learner(rows=12, batch_size=4)
        made.take(sequences([1] * 12), sequences([]), sizes=[2, 10], weights=[3.0, 1.0])
        return made

    whole, resumed = mixed(), mixed()
    batches = [whole.rows_of(step) for step in range(1, 11)]
    assert [sum(row < 2 for row in rows) for rows in batches] == [3] * 10, "three of four are of the first data set"
    assert sorted(row for rows in batches for row in rows if row >= 2) == list(range(2, 12))
    assert resumed.rows_of(7) == batches[6]


def test_a_rows_first_token_carries_no_loss():
    part = sequences([3, 1, 4], [1, 1, 1, 1, 0, 0, 1, 1])
    assert predictable(part).astype(int).tolist() == [0, 1, 1, 0, 0, 0, 1, 1]
    assert part.loss_mask.tolist()[0], "the data stays as it is"


def test_empty_rows_take_no_neighbours_token():
    assert predictable(sequences([2, 0, 2, 0])).astype(int).tolist() == [0, 1, 0, 1]


def test_a_reward_models_loss_counts_pairs():
    pairs = Pairs(sequences([2, 3]), sequences([4, 1]))
    made = RewardModelLearner(LearnerConfig(), ModelConfig(path="unused"), 0, 1, 0, 1, 2)
    assert made.count(pairs) == 2


@pytest.fixture
def step_learner(monkeypatch):
    """A learner of step rewards with some labels, whose model answers with some logits."""
    def made(steps, ids, logits):
        learner = ProcessRewardLearner(steps, config=LearnerConfig(), model=ModelConfig(path="m"), rank=0, world=1,
                                       seed=0, total_steps=1, batch_size=1)
        learner.engine = SimpleNamespace(device="cpu", forward=lambda *_: logits)
        monkeypatch.setattr(supervised_learner, "load_causal_lm", lambda *_: None)
        monkeypatch.setattr(supervised_learner, "PackedStepModel", lambda *_: None)
        monkeypatch.setattr(supervised_learner, "load_tokenizer", lambda _: None)
        monkeypatch.setattr(supervised_learner.StepTokens, "of", lambda *_: ids)
        learner.build()
        return learner

    return made


def test_steps_with_three_labels_have_the_cross_entropy_among_them(step_learner):
    """Labels are tokens 2, 3 and 5 of a vocabulary of 6; other tokens' logits have no part."""
    logits = torch.full((3, 6), 9.0)
    logits[:, [2, 3, 5]] = torch.tensor([[1.0, 0.0, 0.5], [0.2, 0.1, 0.9], [0.3, 0.8, 0.1]])
    learner = step_learner(StepsConfig(placeholder="?", others={"=": 0.5}),
                           StepTokens(0, 2, 3, [], (5,), (1.0, 0.0, 0.5)), logits)
    part = StepRows(offsets=offsets_of([4]), tokens=np.array([1, 0, 0, 0], np.int32),
                    placeholders=np.array([False, True, True, True]), labels=np.array([-100, 2, 5, 5]))
    found = learner.loss(part)
    among = logits[:, [2, 3, 5]].double().numpy()
    shares = np.exp(among) / np.exp(among).sum(1, keepdims=True)
    assert found.means["loss"] == found.loss
    assert float(found.loss) == pytest.approx(-np.log(shares[[0, 1, 2], [0, 2, 2]]).mean(), rel=1e-5)
    assert float(found.means["accuracy"]) == pytest.approx(2 / 3), "the third is taken for a bad one"
    assert float(found.means["probability"]) == pytest.approx((shares @ [1, 0, 0.5]).mean(), rel=1e-5)


def test_a_soft_label_of_one_half_counts_as_a_good_step(step_learner):
    logits = torch.zeros(2, 4)
    logits[:, 2] = 1.0  # both are probably good
    learner = step_learner(StepsConfig(placeholder="?"), StepTokens(0, 2, 3, [], (), (1.0, 0.0)), logits)
    part = StepRows(offsets=offsets_of([3]), tokens=np.array([1, 0, 0], np.int32),
                    placeholders=np.array([False, True, True]), labels=np.array([np.nan, 0.5, 0.5]))
    assert float(learner.loss(part).means["accuracy"]) == 1
