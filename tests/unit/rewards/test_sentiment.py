import numpy as np

from rlhf_ray.rewards import sentiment
from rlhf_ray.rewards.sentiment import judge_scores


def test_scores_are_vaders_compound():
    scores = judge_scores(["The rooms were wonderful.", "The rooms were horrible.", "The rooms were square.", ""])
    # One word of valence v gives v / sqrt(v**2 + 15) (VADER's normalisation): 2.7 and -2.5 here.
    expected = [2.7 / (2.7**2 + 15) ** 0.5, -2.5 / (2.5**2 + 15) ** 0.5, 0, 0]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert scores.dtype == np.float32


def test_no_texts_give_no_scores():
    assert judge_scores([]).shape == (0,)


def test_the_lexicon_is_read_once():
    assert sentiment._analyser() is sentiment._analyser()
