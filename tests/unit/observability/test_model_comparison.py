"""What is told of two models: numbers by hand, and a page that is whole and safe."""

import io
import json
import re
from dataclasses import replace
from math import nan, sqrt

import pytest

from rlhf_ray.algorithms.win_rate import Z95, outcome, win_rate
from rlhf_ray.observability.model_comparison import Comparison, Pair, comparison_page, print_comparison


def compared(scores, tokens=(4, 5), texts=("one", "two"), tie=0.0):
    pairs = [Pair(f"prompt {i}", texts, pair, tokens, outcome(*pair, tie)) for i, pair in enumerate(scores)]
    return Comparison(("first/model", "second/model"), "vader", len(pairs), pairs,
                      win_rate([[pair.outcome] for pair in pairs]), {"Seed": "0"})


def test_means_and_the_margin_with_its_interval():
    found = compared([(1.0, 2.0), (2.0, 5.0)])
    assert found.means("scores") == (1.5, 3.5) and found.means("tokens") == (4, 5)
    mean, low, high = found.margin()  # margins 1 and 3: mean 2, standard deviation sqrt(2)
    assert mean == 2.0 and (low, high) == pytest.approx((2 - Z95 * sqrt(2) / sqrt(2), 2 + Z95))


@pytest.mark.parametrize(("wins", "losses", "words"), [
    (90, 10, "B wins, with a win rate of 90.0%"), (10, 90, "A wins: B has a win rate of 10.0%"),
    (55, 45, "neither is shown to be better: B has a win rate of 55.0%"),
])
def test_a_side_wins_where_the_interval_leaves_out_one_half(wins, losses, words):
    assert compared([(0.0, 1.0)] * wins + [(1.0, 0.0)] * losses).verdict().startswith(words)


def test_the_summary_is_json_with_every_pair():
    summary = json.loads(json.dumps(compared([(1.0, 2.0), (1.0, 1.0), (3.0, 1.0)]).summary()))
    assert (summary["wins"], summary["ties"], summary["losses"], summary["win_rate"]) == (1, 1, 1, 0.5)
    mean, *interval = compared([(1.0, 2.0), (1.0, 1.0), (3.0, 1.0)]).margin()
    assert (summary["margin"], summary["margin_interval"]) == (mean, interval)
    assert compared([(1.0, 2.0)]).summary()["margin_interval"] is None, "of one pair"
    assert summary["score"] == {"a": pytest.approx(5 / 3), "b": pytest.approx(4 / 3)}
    assert [pair["outcome"] for pair in summary["pairs"]] == ["win", "tie", "loss"]
    assert summary["pairs"][0] == {"prompt": "prompt 0", "a": "one", "b": "two", "scores": [1.0, 2.0],
                                   "tokens": [4, 5], "outcome": "win"}


def test_an_episode_that_failed_is_in_no_mean_and_further_numbers_are_shown():
    made = compared([(1.0, 2.0), (1.0, 4.0)])
    failed = Pair("prompt 2", ("one", "two"), (3.0, nan), (4, 5), "loss")
    found = replace(made, pairs=[*made.pairs, failed], numbers={"solved": (0.5, 0.25)})
    assert found.means("scores") == (5 / 3, 3.0) and found.means("tokens") == (4, 5)
    assert found.margin()[0] == 2.0, "margins 1 and 3"
    assert found.summary()["solved"] == {"a": 0.5, "b": 0.25}
    stream = io.StringIO()
    print_comparison(found, stream)
    assert "solved 0.5 0.25 -0.25 worse" in " ".join(stream.getvalue().split())
    page = comparison_page(found)
    assert "0.5 → 0.25" in page and page.count('class="text card"') == 3


def test_a_person_reads_names_means_and_the_verdict():
    stream = io.StringIO()
    print_comparison(compared([(0.0, 1.0)] * 9 + [(1.0, 0.0)]), stream)
    assert stream.getvalue() == (
        "A: first/model\nB: second/model\n"
        "metric    A    B       change\n"
        "score   0.1  0.9  +0.8 better\n"
        "tokens    4    5           +1\n"
        "B against A by vader: 9 wins, 0 ties, 1 losses\n"
        "verdict: B wins, with a win rate of 90.0% (95 % interval 59.6% to 98.2%)\n")


def test_the_page_has_every_pair_with_what_it_is_sorted_and_filtered_by():
    page = comparison_page(compared([(0.0, 1.0), (1.0, 1.0), (2.0, -1.0)]))
    cards = re.findall(r'data-order="(\d+)" data-margin="([^"]+)" data-outcome="(\w+)"', page)
    assert cards == [("0", "1", "win"), ("1", "0", "tie"), ("2", "-3", "loss")]
    for button in ("All 3", "B wins 1", "Tie 1", "A wins 1"):
        assert f">{button}</button>" in page
    figures = json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)[1])
    assert figures[0]["data"][0]["x"] == [1.0, 0.0, -3.0]
    assert (figures[1]["data"][0]["x"], figures[1]["data"][0]["y"]) == ([0.0, 1.0, 2.0], [1.0, 1.0, -1.0])


def test_texts_cannot_become_markup_and_nothing_is_loaded():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = comparison_page(compared([(0.0, 1.0)], texts=(evil, evil)))
    assert evil not in page and "&lt;/script&gt;&lt;script&gt;alert(1)" in page and "<img" not in page
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="?http', page)


def test_a_great_difference_of_length_is_pointed_out():
    assert "A answers at much greater length" in comparison_page(compared([(0.0, 1.0)], tokens=(40, 10)))
    assert "much greater length" not in comparison_page(compared([(0.0, 1.0)], tokens=(12, 10)))
