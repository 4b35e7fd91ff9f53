"""What a checkpoint keeps of a run: through JSON and back."""

import json

import numpy as np
import pytest

from rlhf_ray.algorithms.kl import AdaptiveKL, FixedKL
from rlhf_ray.checkpoint.state_files import load_state, save_state
from rlhf_ray.config.algorithm import KLConfig
from rlhf_ray.coordinator.run_state import RunState, kl_controller
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import ExperienceSummary, RewardTerms, SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import Chunk, Place


def fresh(rows=20):
    return RunState(AdaptiveKL(0.2, 6.0, 1000), PromptCursor(rows, 3, shuffle=True))


def under_way():
    """Chunks as the buffer brings them back: without their keys."""
    return [Chunk(Place(9), 2, 4), Chunk(Place(11, (1,)), 1, 4)]


KEYS = [[SampleKey(1, 2, 0), SampleKey(1, 2, 1)], [SampleKey(1, 5, 0)]]


def used():
    state = fresh()
    state.cursor.next(27)
    state.kl.update(12.0, 100)
    state.step, state.samples, state.unmeasured = 4, 32, False
    state.observe_scores(np.array([1.0, 2.0, 6.0], dtype=np.float32))
    state.best.follow("reward", "max")
    state.best.step, state.best.value = 2, 1.5
    state.early_stop.observe(4, 3.5, 1.25)
    return state


def saved(state):
    """The state with two chunks under way, as it comes back from JSON."""
    chunks = under_way()
    for chunk, keys in zip(chunks, KEYS, strict=True):
        chunk.keys = keys
    return json.loads(json.dumps(state.state_dict(chunks)))


def test_a_state_comes_back_from_json_as_it_was():
    state, again, chunks = used(), fresh(), under_way()
    again.load_state_dict(saved(state), chunks)
    assert (again.step, again.published, again.samples, again.unmeasured) == (4, 4, 32, False)
    assert [chunk.keys for chunk in chunks] == KEYS
    assert again.kl.value == state.kl.value == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert again.scores.state_dict() == state.scores.state_dict() and again.scores.count == 3
    assert again.best == state.best and again.best.metric == "reward"
    assert again.early_stop == state.early_stop and again.early_stop.kl == [3.5]
    assert again.cursor.next(30) == state.cursor.next(30)


def test_a_state_of_other_data_is_refused_before_anything_changes():
    again = fresh(rows=21)
    with pytest.raises(CheckpointError, match="rows=20"):
        again.load_state_dict(saved(used()))
    assert (again.step, again.kl.value) == (0, 0.2)


def test_held_out_rows_that_changed_are_refused_by_name_and_other_files_are_not():
    state = used()
    state.held_out = [["eval.jsonl", "1f"]]
    for held_out in ([["eval.jsonl", "1f"]], [["other.jsonl", "2f"]], []):
        again = fresh()
        again.held_out = held_out
        again.load_state_dict(saved(state), under_way())
    again.held_out = [["eval.jsonl", "2f"]]
    with pytest.raises(CheckpointError, match="the rows of eval.jsonl are not those"):
        again.load_state_dict(saved(state))


def test_held_out_parts_of_one_data_set_are_compared_each_with_its_own():
    state, again = used(), fresh()
    state.held_out = again.held_out = [["team/set", "1f"], ["other.jsonl", "3f"], ["team/set", "2f"]]
    again.load_state_dict(saved(state), under_way())
    again.held_out = [["team/set", "1f"], ["team/set", "3f"]]
    with pytest.raises(CheckpointError, match=r"the rows of team/set are not those .*digest 2f then, 3f now"):
        again.load_state_dict(saved(state))


@pytest.mark.parametrize("normalisation, mean, deviation", [
    ("none", 0.0, 1.0), ("scale", 0.0, 7**0.5), ("standardise", 3.0, 7**0.5),  # of 1, 2 and 6
])
def test_rewards_are_made_with_the_moments_of_earlier_steps(normalisation, mean, deviation):
    assert fresh().reward_terms(normalisation) == RewardTerms(0.2, 0.0, 1.0), "nothing is known in the first step"
    terms = used().reward_terms(normalisation)
    assert (terms.score_mean, terms.score_deviation) == (pytest.approx(mean), pytest.approx(deviation))
    assert terms.kl_coef == used().kl.value


@pytest.mark.parametrize("kind, cls", [("fixed", FixedKL), ("adaptive", AdaptiveKL)])
def test_the_controller_is_the_configured_one(kind, cls):
    controller = kl_controller(KLConfig(kind=kind, coef=0.3, target=5.0, horizon=1000))
    assert type(controller) is cls and controller.value == 0.3
    controller.update(10.0, 100)
    assert controller.value == (0.3 if kind == "fixed" else pytest.approx(0.3 * 1.02))
    if kind == "adaptive":
        assert (controller.target, controller.horizon) == (5.0, 1000.0)


@pytest.mark.parametrize("gold", [None, np.array([0.5, -0.5], dtype=np.float32)])
def test_a_summary_comes_back_from_disk_as_it_was(summary, tmp_path, gold):
    keys = [SampleKey(0, 3, 0), SampleKey(1, 4, 2)]
    said = summary(keys, version=6, gold=gold)
    save_state(tmp_path / "s.json", {"summary": vars(said)})
    again = ExperienceSummary(**load_state(tmp_path / "s.json")["summary"])
    for name, value in vars(said).items():
        back = getattr(again, name)
        if isinstance(value, np.ndarray):
            assert back.dtype == value.dtype and back.tolist() == value.tolist(), name
        else:
            assert back == value, name


@pytest.mark.parametrize("name", ["best", "early_stop", "kl", "cursor"])
def test_a_state_of_another_version_is_refused_by_what_it_lacks(name):
    state = saved(used())
    del state[name]
    with pytest.raises(CheckpointError, match=f"state of the run lacks {name}: another version"):
        fresh().load_state_dict(state)


def test_the_state_of_chunks_is_read_with_their_keys():
    """One has lost some of its samples."""
    buffer = ReplayBuffer(16, None, 1)
    chunks = buffer.load_state_dict({
        "version": 4, "trained": 32, "next_order": 12, "reserved": [[9, 2, 1, {}], ["11.1", 2, 3, {"score": [0.0]}]],
        "ready": [{"order": 10, "keys": [[1, 3, 0], [1, 3, 1]], "min_version": 4, "nbytes": 20,
                   "filtered": {"score": [1.0, 1.0]}}],
    }, {10: "a reference"})
    state = saved(used()) | {"in_flight": [[9, [[1, 2, 0], [1, 2, 1]]], ["11.1", [[1, 5, 0]]]]}
    fresh().load_state_dict(state, chunks)
    assert [(chunk.place, chunk.keys, chunk.complete) for chunk in chunks] == [
        (Place(9), KEYS[0], True), (Place(11, (1,)), KEYS[1], False)]
    assert [(chunk.place, chunk.experience) for chunk in buffer.ready()] == [(Place(10), "a reference")]
    assert [(chunk.draws, chunk.filtered) for chunk in (*chunks, *buffer.ready())] == [
        (1, {}), (3, {"score": [0.0]}), (1, {"score": [1.0, 1.0]})]
