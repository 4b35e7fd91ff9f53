"""The requests of one call to an engine: it is woken once."""

from types import SimpleNamespace

import pytest

from rlhf_ray.errors import WorkerError
from rlhf_ray.roles.engines.in_process import RequestBatch


def output(request_id):
    return SimpleNamespace(request_id=request_id)


def name_of(output):
    return f"response {output.request_id}"


def test_a_call_is_woken_when_its_last_request_is_over_and_gets_results_in_its_own_order():
    together, woken = RequestBatch.of(["3", "4", "5"], name_of), []
    together.done.add_done_callback(lambda done: woken.append(done.result()))
    for request_id in ("4", "5"):
        together.take(output(request_id))
        assert not woken
    together.take(output("3"))
    assert woken == [["response 3", "response 4", "response 5"]]


def test_a_call_fails_once_whatever_happens_to_its_other_requests():
    together = RequestBatch.of(["3", "4"], name_of)
    together.fail(WorkerError("vLLM broke"))
    together.fail(WorkerError("it was stopped"))
    together.take(output("3"))
    together.take(output("4"))
    with pytest.raises(WorkerError, match="vLLM broke"):
        together.done.result(0)


def test_an_output_that_is_no_result_fails_the_call():
    def refuse(_):
        raise WorkerError("vLLM gave no log-probabilities")

    together = RequestBatch.of(["3"], refuse)
    together.take(output("3"))
    with pytest.raises(WorkerError, match="no log-probabilities"):
        together.done.result(0)


def test_nobody_is_told_of_the_end_of_a_cancelled_call():
    together = RequestBatch.of(["3"], name_of)
    assert together.done.cancel()
    together.take(output("3"))
    together.fail(WorkerError("vLLM broke"))
    assert together.done.cancelled()
