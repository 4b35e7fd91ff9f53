"""Requests to a run that is going on: asked from a thread, as a command would from another process."""

import asyncio
import json
import time

import pytest

from rlhf_ray.errors import ConfigError, WorkerError
from rlhf_ray.observability import control_files
from rlhf_ray.observability.control_files import answering, ask
from rlhf_ray.observability.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(control_files, "LOOK_EVERY_S", 0.02)
    directory = RunDirectory(tmp_path)
    directory.write_json("status.json", {"time": time.time(), "step": 3})
    return directory


async def double(arguments):
    return {"twice": 2 * arguments["number"]}


def asked(run, handlers, *questions, timeout_s=20.0):
    """What a run with these handlers answers to questions that are asked side by side."""

    async def work():
        async with answering(run, handlers):
            return await asyncio.gather(*(asyncio.to_thread(ask, run.path, *question, timeout_s)
                                          for question in questions))

    return asyncio.run(work())


def test_a_request_is_done_and_answered_and_leaves_no_files(run):
    assert asked(run, {"double": double}, ("double", {"number": 4})) == [{"twice": 8}]
    assert list(run.control.iterdir()) == []


def test_a_request_is_done_once_however_long_it_takes(run):
    times = []

    async def slow(_):
        times.append(1)
        await asyncio.sleep(0.3)
        return {}

    asked(run, {"slow": slow}, ("slow", {}))
    assert len(times) == 1


def test_requests_do_not_wait_for_each_other(run):
    there = asyncio.Event()

    async def first(_):
        await asyncio.wait_for(there.wait(), 10)
        return {"order": "last"}

    async def second(_):
        there.set()
        return {"order": "first"}

    assert asked(run, {"a": first, "b": second}, ("a", {}), ("b", {})) == [{"order": "last"}, {"order": "first"}]


def test_a_refusal_carries_its_reason_and_the_run_goes_on(run):
    async def refuse(_):
        raise ConfigError("pool 'gen' has no room for a third generator")

    async def break_down(_):
        raise ZeroDivisionError("division by zero")

    handlers = {"refuse": refuse, "bug": break_down, "double": double}
    with pytest.raises(ConfigError, match="no room for a third"):
        asked(run, handlers, ("refuse", {}))
    with pytest.raises(ConfigError, match="'bug' failed: ZeroDivisionError"):
        asked(run, handlers, ("bug", {}))
    with pytest.raises(ConfigError, match=r"does not support 'dance'; use one of bug, double, refuse"):
        asked(run, handlers, ("dance", {}))
    assert asked(run, handlers, ("double", {"number": 1})) == [{"twice": 2}]


def test_a_request_that_the_run_does_not_live_to_answer_is_refused(run):
    async def forever(_):
        await asyncio.sleep(3600)

    async def work():
        async with answering(run, {"wait": forever}):
            task = asyncio.create_task(asyncio.to_thread(ask, run.path, "wait", {}, 20.0))
            await asyncio.sleep(0.3)
        return await task

    with pytest.raises(ConfigError, match="ended before it completed 'wait'"):
        asyncio.run(work())


def test_requests_to_an_earlier_process_are_not_carried_out_by_the_next(run):
    run.control.mkdir()
    (run.control / "old.request.json").write_text(json.dumps({"what": "double", "arguments": {"number": 1}}))

    async def work():
        async with answering(run, {"double": double}):
            await asyncio.sleep(0.1)

    asyncio.run(work())
    assert "has ended" in (run.control / "old.answer.json").read_text()


@pytest.mark.parametrize("rubbish", [b"[1, 2", b"\xff\xfe\x00", b"[" * 200_000], ids=["half", "no text", "deep"])
def test_a_file_that_is_no_request_is_refused_and_does_not_end_the_run(run, rubbish):
    run.control.mkdir()
    (run.control / "early.request.json").write_bytes(rubbish)

    async def work():
        async with answering(run, {"double": double}):
            (run.control / "bad.request.json").write_bytes(rubbish)
            return await asyncio.to_thread(ask, run.path, "double", {"number": 3}, 20.0)

    assert asyncio.run(work()) == {"twice": 6}
    assert "not a request" in (run.control / "bad.answer.json").read_text()


@pytest.mark.parametrize("status, message", [
    (None, "no run is in progress"),
    ({"time": 0, "ended": "finished"}, r"has ended \(finished\)"),
    ({"time": 0}, "hangs or is gone"),
])
def test_only_a_run_that_goes_on_can_be_asked(run, status, message):
    run.status.unlink()
    if status is not None:
        run.write_json("status.json", status)
    with pytest.raises(ConfigError, match=message):
        ask(run.path, "double", {"number": 1})


def test_a_run_that_does_not_answer_is_named_when_time_is_over(run):
    with pytest.raises(WorkerError, match=r"did not answer 'double' within 0\.1 s"):
        ask(run.path, "double", {"number": 1}, timeout_s=0.1)
    assert list(run.control.iterdir()) == [], "nobody waits for it any more, so nobody may do it later"
