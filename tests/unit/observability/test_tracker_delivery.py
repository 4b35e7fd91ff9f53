"""Trackers that are slow, away or hang, against servers that do so: the run goes on, and has all its numbers itself."""

import importlib.util
import json
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability import delivery
from rlhf_ray.observability.delivery import Delivery
from rlhf_ray.observability.metrics import MetricsWriter, read_metrics

ANSWERS = {
    "experiments/search": {"experiments": [{"experiment_id": "7", "name": "e", "artifact_location": "/x"}]},
    "runs/create": {"run": {"info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING"}}},
    "runs/get": {"run": {"info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING"}}},
    "runs/log-batch": {}, "runs/update": {}, "take": {},
}
"""What an MLflow server says to those who open a run and log to it; `take` is for the tracker below."""


@contextmanager
def server(hangs_at):
    """The address of a server that never answers paths that contain `hangs_at`, and the list of those it was asked."""
    asked, over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0].removeprefix("/api/2.0/mlflow/").strip("/")
            asked.append(path)
            if hangs_at in path:
                over.wait(600)  # longer than a test may take
                return
            body = json.dumps(ANSWERS[path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        over.set()
        http.shutdown()
        http.server_close()


class HttpTracker:
    """The least that asks a server something."""

    title, where, fix = "Tracker", "there", "do without"

    def __init__(self, url, opens_at="take"):
        self.url, self.opens_at = url, opens_at

    def open(self):
        urllib.request.urlopen(f"{self.url}/{self.opens_at}").read()

    def write(self, step, values):
        urllib.request.urlopen(f"{self.url}/take", data=json.dumps([step, values]).encode()).read()

    def close(self):
        self.write(-1, {})


class Gated(HttpTracker):
    """Takes its first row when the gate is opened."""

    def __init__(self, url):
        super().__init__(url)
        self.gate, self.called, self.steps = threading.Event(), threading.Event(), []

    def write(self, step, values):
        self.called.set()
        self.gate.wait(30)
        super().write(step, values)
        self.steps.append(step)


@pytest.fixture
def hasty(monkeypatch):
    """Deadlines that a test can wait for."""
    for name in ("OPENING_S", "LATE_S", "CLOSING_S"):
        monkeypatch.setattr(delivery, name, 0.5)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("rlhf_ray")]


def test_rows_arrive_in_order_and_nothing_is_said(caplog):
    with server("nothing") as (url, asked):
        tracker = Gated(url)
        sink = Delivery(tracker, must_open=True)
        tracker.gate.set()
        for step in range(20):
            sink.write(step, {"a": 1.0})
        sink.close()
    assert tracker.steps == [*range(20), -1] and len(asked) == 22
    assert not said(caplog)


def test_a_server_that_never_answers_holds_nobody_up_and_is_told_of_once(hasty, caplog):
    with server("take") as (url, asked):
        sink = Delivery(HttpTracker(url, opens_at="runs/update"), must_open=True)
        for step in range(5):
            sink.write(step, {"a": 1.0})
        while not asked:  # the server is asked, and never answers: no write waits for that
            time.sleep(0.01)
        time.sleep(0.6)
        sink.write(5, {"a": 1.0})
        sink.write(6, {"a": 1.0})
        assert [text for text in said(caplog) if "has not answered" in text] == said(caplog)[:1]
        began = time.monotonic()
        sink.close()
        assert time.monotonic() - began > 0.4
        assert asked.count("take") == 1
    late, last = said(caplog)
    assert "metrics.jsonl" in late and "Tracker lacks 7 of 7 rows" in last


def test_what_waits_is_bounded_and_the_newest_rows_are_left_out(monkeypatch, caplog):
    monkeypatch.setattr(delivery, "MOST_ROWS", 10)
    with server("nothing") as (url, _):
        tracker = Gated(url)
        sink = Delivery(tracker, must_open=True)
        sink.write(0, {})
        assert tracker.called.wait(30)  # this row does not wait any more
        for step in range(1, 100):
            sink.write(step, {})
        tracker.gate.set()
        sink.close()
    kept = tracker.steps[:-1]
    assert kept == list(range(11))
    assert said(caplog)[-1].startswith(f"Tracker lacks {100 - len(kept)} of 100 rows")
    assert len(said(caplog)) == 2


def test_a_tracker_that_refuses_every_row_says_so_once(caplog):
    with server("nothing") as (url, _):
        tracker = HttpTracker(url)
        tracker.write = lambda *_: 1 / 0
        sink = Delivery(tracker, must_open=True)
        for step in range(5):
            sink.write(step, {})
        sink.close()
    first, last = said(caplog)
    assert "did not take the numbers of step 0: division by zero" in first and "lacks 5 of 5" in last


def test_a_new_run_is_refused_when_its_tracker_does_not_answer(hasty):
    with server("take") as (url, _), pytest.raises(ConfigError, match=r"has not answered within 0\.5 s.*do without"):
        Delivery(HttpTracker(url), must_open=True)


def test_a_run_that_goes_on_does_not_wait_for_its_tracker_to_be_opened(hasty, caplog):
    with server("take") as (url, _):
        sink = Delivery(HttpTracker(url), must_open=False)  # where it has to open, this is an error
        sink.write(1, {})
        sink.close()
    assert said(caplog) == ["Tracker lacks 1 of 1 rows: there did not take them within 0.5 s. metrics.jsonl has them"]


MLFLOW = LoggingConfig(trackers=["mlflow"], project="e", tensorboard=False, ray_metrics=False)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None,
                    reason="mlflow is not installed: pip install 'rlhf-ray[mlflow]'")
@pytest.mark.parametrize("hangs_at", ["runs/log-batch", "runs/update"])
def test_a_run_beside_a_real_mlflow_client_goes_on_when_its_server_hangs(
        hasty, hangs_at, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(delivery, "OPENING_S", 30)
    with server(hangs_at) as (url, asked):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        writer = MetricsWriter(tmp_path, MLFLOW)
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": 0.5})
        if hangs_at == "runs/update":
            while asked.count("runs/log-batch") < 3:
                time.sleep(0.01)
        writer.close()  # while the server still hangs
    assert (tmp_path / "mlflow_run.txt").read_text() == "r1"
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert hangs_at in asked and len(said(caplog)) == 1
