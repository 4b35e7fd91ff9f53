"""The requests of one call to an engine: it is woken once."""

from types import SimpleNamespace

import pytest

from rlhf_ray.errors import WorkerError
from rlhf_ray.roles.engines import in_process
from rlhf_ray.roles.engines.in_process import RequestBatch


def output(request_id):
    return SimpleNamespace(request_id=request_id)


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Results are names of outputs."""
    monkeypatch.setattr(in_process, "completion_of", lambda output: f"response {output.request_id}")


def test_a_call_is_woken_when_its_last_request_is_over_and_gets_results_in_its_own_order():
    batch, woken = RequestBatch.of(["3", "4", "5"]), []
    batch.done.add_done_callback(lambda done: woken.append(done.result()))
    for request_id in ("4", "5"):
        batch.take(output(request_id))
        assert not woken
    batch.take(output("3"))
    assert woken == [["response 3", "response 4", "response 5"]]


def test_a_call_fails_once_whatever_happens_to_its_other_requests():
    batch = RequestBatch.of(["3", "4"])
    batch.fail(WorkerError("vLLM broke"))
    batch.fail(WorkerError("it was stopped"))
    batch.take(output("3"))
    batch.take(output("4"))
    with pytest.raises(WorkerError, match="vLLM broke"):
        batch.done.result(0)


def test_an_output_that_is_no_result_fails_the_call(monkeypatch):
    def refuse(_):
        raise WorkerError("vLLM gave no log-probabilities")

    monkeypatch.setattr(in_process, "completion_of", refuse)
    batch = RequestBatch.of(["3"])
    batch.take(output("3"))
    with pytest.raises(WorkerError, match="no log-probabilities"):
        batch.done.result(0)


def test_nobody_is_told_of_the_end_of_a_cancelled_call():
    batch = RequestBatch.of(["3"])
    assert batch.done.cancel()
    batch.take(output("3"))
    batch.fail(WorkerError("vLLM broke"))
    assert batch.done.cancelled()
