"""The tokens of an episode: what was sampled is kept as it was, once, and columns cannot shift against each other."""

import numpy as np
import pytest

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.records import SampleKey
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.episode_tokens import EpisodeTokens
from rlhf_ray.roles.rollout_rows import rollout_of


def sample(tokens, *ids, version=0, prompt=None):
    """Append sampled ids, with log-probabilities that tell them apart."""
    request = SampleRequest(tokens.context if prompt is None else prompt, SamplingConfig(), 9, 0, [2])
    tokens.sample(request, Completion(np.array(ids, np.int32), -np.array(ids, np.float32) / 100,
                                      np.full(len(ids), version, np.int32), "stop"))


def rows_of(tokens):
    segments = tokens.segments(7, "stop")
    return rollout_of(segments, [SampleKey(0, 0, 0)], [0] * len(segments), False)


def test_tokens_masks_logprobs_and_versions_are_aligned_over_turns():
    tokens = EpisodeTokens([1, 5])
    sample(tokens, 7, 2, version=3)
    tokens.read([8, 9])
    sample(tokens, 6, 2, version=4)  # with weights that were published in between
    rows = rows_of(tokens)
    assert rows.tokens.tolist() == tokens.context == [1, 5, 7, 2, 8, 9, 6, 2]
    assert rows.response_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert rows.logprobs == pytest.approx([0, 0, -0.07, -0.02, 0, 0, -0.06, -0.02])
    assert rows.versions.tolist() == [-1, -1, 3, 3, -1, -1, 4, 4]


@pytest.mark.parametrize("short", ["tokens", "logprobs", "versions"])
def test_columns_of_different_lengths_are_refused_when_they_are_appended(short):
    tokens = EpisodeTokens([1, 5])
    columns = {"tokens": np.zeros(3, np.int32), "logprobs": np.zeros(3, np.float32), "versions": np.zeros(3, np.int32)}
    columns[short] = columns[short][:2]
    with pytest.raises(ValueError, match="columns of"):
        tokens.sample(SampleRequest([1, 5], SamplingConfig(), 9, 0, [2]), Completion(**columns, finish_reason="stop"))
    assert tokens.context == [1, 5]


def test_a_turn_that_was_sampled_after_other_tokens_is_refused():
    tokens = EpisodeTokens([1, 5])
    with pytest.raises(ValueError, match="other tokens than the 2 of its episode"):
        sample(tokens, 7, 2, prompt=[1, 6])


def test_where_history_is_rewritten_each_sampled_token_is_in_one_row_of_the_sample():
    tokens = EpisodeTokens([1, 5])
    sample(tokens, 7, 2)
    tokens.begin_segment([1, 5, 17, 8])  # the template writes the first turn differently
    sample(tokens, 6, 2)
    tokens.read([9])
    sample(tokens, 4, 3, 2)
    rows = rows_of(tokens)
    assert [rows.row(i, "tokens").tolist() for i in range(2)] == [[1, 5, 7, 2], [1, 5, 17, 8, 6, 2, 9, 4, 3, 2]]
    assert rows.tokens[rows.response_mask].tolist() == [7, 2, 6, 2, 4, 3, 2]
    assert (rows.sample_count, rows.samples.tolist()) == (1, [0, 0])


def test_segments_of_a_sample_weigh_as_their_sampled_tokens():
    """So its mean over tokens does not depend on where segments begin."""
    tokens = EpisodeTokens([1, 5])
    sample(tokens, 7, 2)
    tokens.begin_segment([1, 5, 17])
    sample(tokens, 6, 4, 3, 5, 8, 2)
    assert rows_of(tokens).row_weights.tolist() == [0.25, 0.75]
    nothing = EpisodeTokens([1, 5])
    assert rows_of(nothing).row_weights.tolist() == [1.0]


def test_a_new_segment_in_which_nothing_was_sampled_is_left_out():
    tokens = EpisodeTokens([1, 5])
    sample(tokens, 7, 2)
    tokens.begin_segment([1, 5, 17])
    rows = rows_of(tokens)
    assert (len(rows), rows.tokens.tolist(), rows.finish_reasons) == (1, [1, 5, 7, 2], ["stop"])
