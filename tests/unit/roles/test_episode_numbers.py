"""Numbers about episodes, by hand."""

import numpy as np
import pytest

from rlhf_ray.records import Episode, Turn
from rlhf_ray.roles.episode_numbers import episode_metrics, episode_numbers, incomplete

TURN = Turn(0, 3, 5, 0, "stop")
EPISODES = [
    Episode("shop", "completed", turns=[TURN, TURN], metrics={"items": 3.0}, events={"tool_calls": 2}),
    Episode("shop", "error_timeout", "mask", turns=[TURN], events={"retries": 1}),
    Episode("maze", "truncated_turns", turns=[TURN] * 3, metrics={"items": 5.0}, events={"tool_calls": 1}),
]


def test_columns_have_a_number_for_each_episode():
    columns = episode_numbers(EPISODES)
    assert columns["turns"].tolist() == [2, 1, 3]
    assert columns["tool_calls"].tolist() == [2, 0, 1] and columns["retries"].tolist() == [0, 1, 0]
    assert columns["masked"].tolist() == [0, 1, 0]
    assert columns["cause/completed"].tolist() == [1, 0, 0] and columns["cause/truncated_turns"].tolist() == [0, 0, 1]
    np.testing.assert_equal(columns["shop/items"], np.float32([3, np.nan, np.nan]))
    np.testing.assert_equal(columns["maze/items"], np.float32([np.nan, np.nan, 5]))


def test_metrics_are_means_over_the_episodes_that_have_a_number():
    metrics = episode_metrics([episode_numbers(EPISODES[:2]), episode_numbers(EPISODES[2:])])
    assert metrics["episodes/turns"] == pytest.approx(2)
    assert metrics["episodes/shop/items"] == 3 and metrics["episodes/maze/items"] == 5
    assert metrics["episodes/cause/error_timeout"] == pytest.approx(1 / 3)
    assert "episodes/cause/error_parse" not in metrics


def test_what_did_not_complete_has_its_cause_and_whether_it_is_masked():
    assert incomplete(episode_numbers(EPISODES)) == [None, "error_timeout, masked", "truncated_turns"]


def test_single_responses_have_no_numbers():
    assert episode_numbers(None) == {} and episode_metrics([{}, {}]) == {} and incomplete({}) is None
