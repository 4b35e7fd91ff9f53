"""The batch of one update, its mini-batches, and what is said about the update."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.errors import TrainingError
from rlhf_ray.records import Batch, Experience, SampleKey, offsets_of
from rlhf_ray.roles.critic_learner import value_metrics
from rlhf_ray.roles.ppo_update import ChosenRows, mini_batches, run_update, training_batch


def experience_of(rows, first=0):
    """Rows of (advantage or None for a prompt token); the token ids are running numbers from `first`."""
    flat = [a for row in rows for a in row]
    mask = np.array([a is not None for a in flat])
    numbers = np.array([0.0 if a is None else a for a in flat], dtype=np.float32)
    return Experience(
        offsets=offsets_of([len(row) for row in rows]), tokens=np.arange(first, first + len(flat), dtype=np.int32),
        response_mask=mask, behaviour_logprobs=numbers, old_logprobs=numbers, reference_logprobs=numbers,
        values=numbers, advantages=numbers, returns=numbers, keys=[SampleKey(0, i, 0) for i in range(len(rows))],
    )


PARTS = [experience_of([[None, 1.0, 2.0], [None, 6.0]]), experience_of([[None, None, 3.0]], first=5)]


def test_a_batch_is_all_experience_in_the_order_given():
    batch = training_batch(PARTS, whiten=False)
    assert batch.tokens.tolist() == list(range(8)) and batch.lengths.tolist() == [3, 2, 3]
    assert batch.advantages.tolist() == [0, 1, 2, 0, 6, 0, 0, 3]
    assert training_batch(PARTS[::-1], whiten=False).tokens.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]


def test_whitening_spans_the_whole_batch_with_unbiased_variance():
    batch = training_batch(PARTS, whiten=True)
    # Of 1, 2, 6, 3: mean 3, squared distances 4 + 1 + 9 + 0 = 14, variance 14 / 3.
    spread = (14 / 3) ** 0.5
    expected = [0, -2 / spread, -1 / spread, 0, 3 / spread, 0, 0, 0]
    assert batch.advantages == pytest.approx(expected, abs=1e-6)
    assert batch.returns.tolist() == [0, 1, 2, 0, 6, 0, 0, 3], "only advantages are whitened"
    assert PARTS[0].advantages.tolist() == [0, 1, 2, 0, 6], "the experience in the store stays as it is"


def test_every_epoch_visits_each_row_once_in_its_own_order():
    batches = list(mini_batches(12, epochs=3, per_epoch=4, seed=5, step=2))
    assert [len(b) for b in batches] == [3] * 12
    orders = [np.concatenate(batches[i : i + 4]).tolist() for i in (0, 4, 8)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("other", [{}, {"seed": 6}, {"step": 3}])
def test_the_order_follows_from_seed_and_step_alone(other):
    place = {"seed": 5, "step": 2}
    one, two = (np.concatenate(list(mini_batches(16, 2, 4, **p))).tolist() for p in (place, {**place, **other}))
    assert (one == two) is (not other)


def test_the_epoch_does_not_depend_on_how_many_there_are():
    few, many = (list(mini_batches(8, epochs, 2, 1, 1)) for epochs in (1, 3))
    assert [b.tolist() for b in few] == [b.tolist() for b in many[:2]]


def learner_of(optimize, counted, **algorithm):
    """One that makes its optimizer steps so, and notes how many of each update were applied. All rows are passed."""
    def chosen_rows(rows):
        return ChosenRows(np.arange(len(rows)), np.arange(len(rows)))

    return SimpleNamespace(
        optimize=optimize, chosen_rows=chosen_rows, seed=3, last_update=None,
        engine=SimpleNamespace(count_update=counted.append),
        algorithm=AlgorithmConfig(**{"epochs": 2, "mini_batches": 2, **algorithm}))


def test_an_update_makes_every_step_and_says_what_it_did():
    seen, counted = [], []

    def optimize(batch, chosen, update, meter):
        assert (update.kl_coef, update.applied) == (0.3, len(seen))
        seen.append(batch)
        meter.add(float(batch.response_mask.sum()), {"loss": torch.tensor(float(len(seen)))})
        return StepResult(applied=True, grad_norm=float(len(seen)), learning_rate=0.1 * len(seen))

    batch = training_batch([PARTS[0], experience_of([[None, 3.0], [None, 4.0]], first=5)], whiten=False)
    learner = learner_of(optimize, counted)
    stats = run_update(learner, batch, step=7, kl_coef=0.3)
    assert counted == [4]
    assert (stats.step, stats.applied, stats.skipped, stats.tokens) == (7, 4, 0, 2 * 9)
    assert [part.tokens.tolist() for part in seen] == [
        batch.select(rows).tokens.tolist() for rows in mini_batches(4, 2, 2, 3, 7)]
    weights = [int(part.response_mask.sum()) for part in seen]
    assert stats.metrics["loss"] == pytest.approx(np.average([1, 2, 3, 4], weights=weights))
    assert stats.metrics["grad_norm"] == 2.5 and stats.metrics["learning_rate"] == pytest.approx(0.4)
    assert stats.seconds >= 0


def mini_batches_of(batch, seed=3, step=7):
    seen = []

    def optimize(part, *_):
        seen.append(part)
        return StepResult(applied=True, grad_norm=1.0, learning_rate=0.1)

    run_update(learner_of(optimize, []), batch, step)
    orders = [np.random.default_rng([seed, step, epoch]).permutation(batch.sample_count) for epoch in (0, 1)]
    return seen, [half.tolist() for order in orders for half in np.array_split(order, 2)]


def test_the_rows_of_a_sample_are_in_one_mini_batch():
    batch = training_batch([experience_of([[None, float(row)] for row in range(7)])], whiten=False)
    batch = replace(batch, samples=np.array([0, 0, 1, 2, 2, 2, 3]))
    rows_of_sample = {0: [0, 1], 1: [2], 2: [3, 4, 5], 3: [6]}
    seen, halves = mini_batches_of(batch)
    assert [part.returns[part.response_mask].tolist() for part in seen] == [
        [row for sample in half for row in rows_of_sample[sample]] for half in halves]
    assert [part.sample_count for part in seen] == [2] * 4


def test_with_one_row_a_sample_mini_batches_have_the_same_bytes_as_rows_permuted():
    batch = training_batch([PARTS[0], experience_of([[None, 3.0], [None, 4.0, 5.0]], first=5)], whiten=True)
    seen, halves = mini_batches_of(batch)
    for part, half in zip(seen, halves, strict=True):
        for f in fields(Batch):
            column = getattr(batch, f.name)
            if column is None:
                assert getattr(part, f.name) is None
                continue
            expected = (offsets_of([len(batch.row(i, "tokens")) for i in half]) if f.name == "offsets"
                        else np.arange(2) if f.name == "samples"
                        else column[half] if f.name == "row_weights"
                        else np.concatenate([batch.row(i, f.name) for i in half]))
            assert getattr(part, f.name).tobytes() == expected.tobytes(), f.name
    assert batch.row_weights.tobytes() == np.ones(4, np.float32).tobytes()


def test_whitening_is_by_token_whatever_the_samples():
    whole = Experience.concat(PARTS)
    two = replace(whole, samples=np.array([0, 0, 1]), row_weights=np.array([0.9, 0.1, 1], np.float32),
                  keys=whole.keys[:2])
    by_token = np.array([1.0, 2.0, 6.0, 3.0])
    expected = (by_token - by_token.mean()) / np.sqrt(by_token.var(ddof=1) + 1e-8)
    whitened = training_batch([two], whiten=True)
    assert whitened.advantages[whitened.response_mask] == pytest.approx(expected, abs=1e-6)
    assert whitened.samples.tolist() == [0, 0, 1]
    assert whitened.advantages.tobytes() == training_batch([whole], whiten=True).advantages.tobytes()


@pytest.mark.parametrize("spoiled", [[2], [1, 2, 3, 4]])
def test_steps_that_were_not_applied_are_counted_and_leave_no_trace_in_the_means(spoiled):
    made, counted = [], []

    def optimize(batch, chosen, update, meter):
        made.append(len(made) + 1)
        good = made[-1] not in spoiled
        meter.add(1.0, {"loss": torch.tensor(float(made[-1]) if good else float("nan"))})
        return StepResult(good, grad_norm=2.0 if good else float("inf"), learning_rate=0.1)

    learner = learner_of(optimize, counted)
    stats = run_update(learner, Batch.concat([critic_batch([1.0] * 4, [1.0] * 4)] * 4), step=7)
    assert (stats.applied, stats.skipped) == (4 - len(spoiled), len(spoiled)) and counted == [stats.applied]
    if stats.applied:
        assert stats.metrics == pytest.approx({"loss": (1 + 3 + 4) / 3, "grad_norm": 2.0, "learning_rate": 0.1})
    else:
        assert "loss" not in stats.metrics and np.isnan(stats.metrics["grad_norm"])


def critic_batch(returns, values):
    batch = training_batch([experience_of([[None, *returns]])], whiten=False)
    return replace(batch, values=np.array([99.0, *values], dtype=np.float32))


def test_returns_and_values_by_hand():
    # Returns 1, 2, 3: mean 2, variance 2/3. Values 1, 2, 2: variance 2/9. Errors 0, 0, 1: variance 2/9. 1 - 1/3.
    assert value_metrics(critic_batch([1.0, 2.0, 3.0], [1.0, 2.0, 2.0])) == pytest.approx({
        "return_mean": 2.0, "return_variance": 2 / 3, "value_variance": 2 / 9, "explained_variance": 2 / 3})
    for returns, values, explained in (([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1), ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 0),
                                       ([2.0, 2.0], [0.0, 1.0], 0)):
        assert value_metrics(critic_batch(returns, values))["explained_variance"] == pytest.approx(explained)


def test_explained_variance_needs_values():
    with pytest.raises(ValueError, match="has none"):
        value_metrics(replace(critic_batch([1.0], [1.0]), values=None))


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_step_that_ends_the_update_is_the_last_and_the_schedule_goes_on(at):
    made, counted, passed = [], [], []

    def optimize(batch, chosen, update, meter):
        made.append(len(made) + 1)
        meter.add(1.0, {"loss": torch.tensor(float(made[-1]))})
        return None if made[-1] == at else StepResult(True, grad_norm=2.0, learning_rate=0.1)

    learner = learner_of(optimize, counted)
    learner.engine.pass_over = passed.append
    stats = run_update(learner, Batch.concat([critic_batch([1.0] * 4, [1.0] * 4)] * 4), step=7)
    assert made == list(range(1, at + 1)) and (stats.applied, stats.skipped) == (at - 1, 0)
    assert passed == [4 - (at - 1)], "the steps that were left out, this one included"
    assert stats.metrics["loss"] == pytest.approx(np.mean(range(1, at))), "what was left out is not in the means"
    assert stats.tokens == at * 2 * 5


def test_an_update_is_made_once_and_only_after_the_one_before():
    counted = []
    learner = learner_of(lambda *_: StepResult(applied=True, grad_norm=1.0, learning_rate=0.1), counted,
                         epochs=1, mini_batches=1)
    batch = Batch.concat([critic_batch([1.0] * 4, [1.0] * 4)] * 4)
    first = run_update(learner, batch, step=7)
    assert run_update(learner, batch, step=7) is first and counted == [1]
    for wrong in (6, 9):
        with pytest.raises(TrainingError, match=f"update {wrong} was requested after update 7"):
            run_update(learner, batch, step=wrong)
    assert run_update(learner, batch, step=8).step == 8 and counted == [1, 1]
