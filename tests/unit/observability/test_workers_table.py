"""Where workers live, in the status and in the report."""

import json

from rich.console import Console

from rlhf_ray.observability.tables import workers_table, workers_text

WORKERS = [
    {"worker": "generator/0", "pool": "gen", "bundle": 0, "host": "10.0.0.2", "node": "abcdef0123", "pid": 12,
     "gpus": ["0", "1"]},
    {"worker": "policy_learner/0", "pool": "learn", "bundle": 0, "host": "10.0.0.3", "node": "fedcba0123", "pid": 14,
     "gpus": []},
    {"worker": "generator/3", "pool": "gen", "bundle": 1, "host": "10.0.0.2", "node": "abcdef0123", "pid": 15,
     "gpus": ["2"]},
]


def test_the_table_has_a_line_for_each_pool_on_each_node():
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(workers_table(WORKERS))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[1][:3] == ["10.0.0.2", "(abcdef01)", "gen"] and len(lines) == 3
    assert "generator/0 (12, GPU 0+1), generator/3 (15, GPU 2)" in captured.get()
    assert "policy_learner/0 (14)" in captured.get()


def test_the_text_for_the_report_is_read_from_the_status(tmp_path):
    status = tmp_path / "status.json"
    assert workers_text(status) == ""
    status.write_text(json.dumps({"step": 3}))
    assert workers_text(status) == ""
    status.write_text(json.dumps({"workers": WORKERS}))
    assert workers_text(status).splitlines()[1] == "10.0.0.3 (fedcba01)  learn: policy_learner/0 (14)"
