"""How runs with and without dynamic sampling are compared: by all samples that they generated."""

import json

from benchmarks.settings_compared import Point, points, reached


def test_a_point_counts_the_samples_of_filtered_prompts(tmp_path):
    rows = [{"step": 0, "eval/reward": 0.25},
            {"step": 1, "reward/mean": 0.5, "time/step": 2.0, "dynamic/filtered": 3.0},
            {"step": 2, "reward/mean": 0.5, "time/step": 4.0}, {"step": 2, "eval/reward": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert points(tmp_path, 64, 8) == [Point(0, 0.25, 0, 0.0), Point(2, 0.75, 64 + 3 * 8 + 64, 6.0)]


def test_arms_are_compared_where_each_first_has_the_lower_of_their_last_accuracies():
    curves = {("without", 0): [Point(4, 0.5, 400, 4.0), Point(8, 0.7, 800, 8.0)],
              ("dynamic sampling", 0): [Point(4, 0.7, 600, 5.0), Point(8, 0.9, 1200, 10.0)]}
    assert reached([0], curves) == [["0", "70.0%", "without", "8", "800", "8"],
                                    ["0", "70.0%", "dynamic sampling", "4", "600", "5"]]
