"""Everything that user code can do wrong, in real processes: each has its cause, and its neighbours are unharmed."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import uvloop

from rlhf_ray.environments import host_process, open_episode
from rlhf_ray.errors import EnvironmentFailed, EpisodeFailed, ReplayDiverged
from tests.gone import gone
from tests.unit.environments.conftest import OBEDIENT, calls, content, open_episodes, say, until

SHORT = {"reset": 0.5, "step": 0.5}
SENDS = ("import os, sys, struct; "
         "(lambda frame: os.write(3, struct.pack('!Q', len(frame)) + frame.encode()))")
"""Code that sends a frame in place of the process that it is in, whose socket has the lowest number."""


async def with_neighbours(pool, code, busy="time.sleep(0.05)"):
    """What the misbehaving one raises; before, both neighbours have made a step, and one makes another meanwhile."""
    bad, idle, busy_one = [await pool.open({}, seed) for seed in (7, 8, 9)]
    for each in (bad, idle, busy_one):
        assert content(await say(each)).endswith(":1")
    failure, step = await asyncio.gather(say(bad, code), say(busy_one, busy), return_exceptions=True)
    assert content(step) == "9:2" and step.reward == 2.0
    assert content(await say(idle)) == "8:2" and content(await say(idle)) == "8:3"
    assert content(await say(busy_one)) == "9:3"
    await asyncio.gather(*(each.close() for each in (bad, idle, busy_one)))
    assert open_episodes(pool) == 0
    return failure, idle.interrupted, busy_one.interrupted


def of_each(pool_of, cases, **config):
    """What `with_neighbours` returns for each case, each in a pool of its own, at the same time."""

    async def one(arguments):
        async with pool_of(processes=1, **config) as pool:
            return await with_neighbours(pool, *arguments)

    async def all_of_them():
        return await asyncio.gather(*map(one, cases))

    return asyncio.run(all_of_them())


def test_what_hangs_in_a_step_is_killed_and_its_neighbours_go_on(pool_of, monkeypatch):
    monkeypatch.setattr(host_process, "ANSWERING_S", 0.3)
    lines = {
        "time.sleep(600)": "eval(code, globals())",
        "forever()": "async def forever(): await asyncio.Event().wait()",
        "deaf()": "time.sleep(600)",
        "spin()": "while True: pass",
        "holds_the_lock()": "C code holds the interpreter's lock",
    }
    for (code, line), (failure, idle, busy) in zip(
            lines.items(), of_each(pool_of, [(code,) for code in lines], timeout_s=SHORT), strict=True):
        assert isinstance(failure, EpisodeFailed) and failure.cause == "error_timeout", code
        assert "gave no answer to step within 0.5 s; its process was killed" in str(failure)
        assert "environments.mine.timeout_s.step" in str(failure) and line in str(failure)
        assert idle == 1 and busy <= 1, code


@pytest.mark.parametrize("together", [False, True])
def test_what_ends_its_process_is_found_out_and_its_neighbours_go_on(pool_of, together):
    endings = {
        "os._exit(3)": "ended its process with exit code 3",
        "os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL",
        "ctypes.string_at(0)": "was killed by SIGSEGV",
        "os.closerange(3, 100)": "was killed by SIGKILL",  # by itself, as it cannot answer any more
        "os.closerange(4, 4096)": "was killed by SIGKILL",  # the same: no event loop works
    }
    cases = [(f"(time.sleep(0.15), {code})", "time.sleep(0.4)" if together else "") for code in endings]
    for ending, (failure, *interrupted) in zip(endings.values(), of_each(pool_of, cases), strict=True):
        assert isinstance(failure, EpisodeFailed) and failure.cause == "error_environment"
        assert f"{ending} in step, also when that was repeated in a process of its own" in str(failure)
        # What dies with several calls may have been killed from outside: it is tried once more before each is alone.
        assert interrupted == [1, 1] or (together and set(interrupted) <= {1, 2})


def test_an_error_or_nonsense_in_a_step_fails_that_episode_alone(pool_of):
    said = {
        "1 / 0": "ZeroDivisionError: division by zero",
        "sys.exit(2)": "SystemExit: 2",
        "throw(KeyboardInterrupt())": "KeyboardInterrupt",
        "throw(Deep('sea'))": "Deep: sea",
        "throw(asyncio.CancelledError())": "CancelledError",
        "throw(Strange())": "Strange: (its text cannot be read)",
        "5": "step returned int 5; it must return a Step, a dict with its keys (messages, reward, done",
        "'x' * 200_000_000": "step returned str 'xxx",
        "{'messages': [{'role': 'user', 'content': 'x' * 200_000_000}]}":
            "the messages of step have 200000000 characters, and may have 16777216",
        "[{'messages': [], 'done': 'x' * 200_000_000}]": "step returned list [{'messages': [], ",
        "{'messages': [{'role': 'user', 'content': '', 'more': 'x' * 20_000_000}]}": "it answered with 20000",
        **{f"{{'messages': [{{'role': 'user', 'content': '', 'more': nested({levels})}}]}}":
           "with more than 100 lists and dicts within each other" for levels in (100, 960, 5000)},
    }

    async def live():
        failures = {}
        async with pool_of(processes=1) as pool:
            other = await pool.open({}, 1)
            for turn, code in enumerate(said, 1):
                with pytest.raises(EpisodeFailed) as caught:
                    await say(await pool.open({}, 0), code)
                failures[code] = caught.value
                assert content(await say(other)) == f"1:{turn}" and other.interrupted == 0
        return failures

    for code, failure in asyncio.run(live()).items():
        assert failure.cause == "error_environment", code
        assert "failed in step: " in str(failure) and said[code] in str(failure)


@pytest.mark.parametrize("frame, said", [
    ('{"episode": 0}', "its keys are episode in place of episode, answer, snapshot"),
    ('{"episode": 0, "exhausted": "memory"}', "its keys are episode, exhausted in place of episode, answer, snapshot"),
    ('{"episode": 0, "error": 5, "exhausted": ""}', "its error is a int"),
    ('{"episode": 0, "answer": 5, "snapshot": null}', "its answer is a int"),
    ('{"episode": 0, "answer": {}, "snapshot": 5}', "its snapshot is a int"),
    ('{"episode": 0, "answer": {}, "snapshot": null}', "its keys are none in place of messages, reward, done"),
    ('{"episode": 0, "answer": {"messages": 3, "reward": 0, "done": true, "truncated": false, "info": {}, '
     '"tool_errors": 0}, "snapshot": null}', "its messages is a int"),
    ('{"episode": 7, "answer": {}, "snapshot": null}', "7"),
    ('{"where": 0}', "its keys are where in place of where, line"), ('{"tool": [], "name": ""}', "its tool is a list"),
    ("[" * 5000, "maximum recursion depth exceeded"), ("5", "int"), ('"x"', "str"), ("{", "Expecting"),
])
def test_what_is_no_answer_is_the_failure_of_the_one_that_sends_it(pool_of, frame, said):
    async def live():
        async with pool_of(processes=1) as pool:
            environment, other = [await pool.open({}, seed) for seed in (0, 1)]
            began = time.monotonic()
            with pytest.raises(EpisodeFailed) as caught:
                await say(environment, f"sends({frame!r})")
            assert time.monotonic() - began < 4.5, "it need not wait for the limit of 5 s"
            assert content(await say(other)) == "1:1"
            return caught.value

    failure = asyncio.run(live())
    assert failure.cause == "error_environment"
    assert "sent what is no answer (" in str(failure) and said in str(failure)


def test_an_error_shows_the_users_line(pool_of):
    async def live():
        async with pool_of() as pool:
            await say(await pool.open({}, 0), "throw(ValueError('no luck'))")

    with pytest.raises(EpisodeFailed, match=r"ValueError: no luck\n  .*mine\.py:\d+: def throw\(error\): raise error"):
        asyncio.run(live())


def test_a_reset_that_fails_leaves_nothing_open(pool_of):
    async def live():
        async with pool_of(processes=1, timeout_s=SHORT) as pool:
            for code, cause in (("time.sleep(600)", "error_timeout"), ("os._exit(3)", "error_environment"),
                                ("1 / 0", "error_environment")):
                with pytest.raises(EpisodeFailed, match="reset") as caught:
                    await pool.open({"reset": code}, 0)
                assert caught.value.cause == cause
            await until(lambda: open_episodes(pool) == 0)
            assert content(await say(await pool.open({}, 5))) == "5:1"

    asyncio.run(live())


def test_a_close_that_hangs_or_raises_is_reported_and_its_neighbour_goes_on(pool_of):
    async def live():
        async with pool_of(processes=1, timeout_s=SHORT) as pool:
            hangs, raises, other = [await pool.open({"close": code}, seed) for seed, code in
                                    enumerate(("time.sleep(600)", "1 / 0", ""))]
            await say(other)
            await asyncio.gather(hangs.close(), raises.close())
            assert content(await say(other)) == "2:2" and other.interrupted == 1
            await hangs.close()
            for _ in range(2):
                await pool.open({}, 1)
            return "\n".join(pool.printed())

    printed = asyncio.run(live())
    assert "environments.mine: 0 closes" in printed and "gave no answer to close within 0.5 s" in printed
    assert "failed in close: ZeroDivisionError" in printed


def test_out_of_memory_is_the_failure_of_the_one_that_takes_it(pool_of):
    async def live():
        async with pool_of(processes=1, memory_mib=200) as pool:
            return await with_neighbours(pool, "hog()")

    failure, idle, _ = asyncio.run(live())
    assert isinstance(failure, EpisodeFailed) and failure.cause == "error_environment"
    assert "ran out of memory: MemoryError" in str(failure) and "environments.mine.memory_mib=200" in str(failure)
    assert idle == 1


def test_a_call_is_not_to_blame_for_a_lock_that_another_holds(pool_of, monkeypatch):
    """Its deadline passes first, since it began first."""
    monkeypatch.setattr(host_process, "ANSWERING_S", 0.3)

    async def live():
        async with pool_of(processes=1, timeout_s={"step": 0.8}) as pool:
            first, holder = [await pool.open({}, seed) for seed in (0, 1)]
            call = asyncio.create_task(say(first, "time.sleep(0.3)"))
            await asyncio.sleep(0.1)
            held, step = await asyncio.gather(say(holder, "holds_the_lock()"), call, return_exceptions=True)
            assert content(step) == "0:1" and first.interrupted == 1
            return held

    held = asyncio.run(live())
    assert isinstance(held, EpisodeFailed) and held.cause == "error_timeout"


def test_an_episode_is_not_to_blame_for_memory_that_another_keeps(pool_of):
    async def live():
        async with pool_of(processes=1, memory_mib=250) as pool:
            keeps, other = [await pool.open({}, seed) for seed in (0, 1)]
            assert content(await say(keeps, "globals().update(kept=bytearray(150 << 20))")) == "0:1"
            assert content(await say(other, "(bytearray(100 << 20), None)[1]")) == "1:1" and other.interrupted == 1

    asyncio.run(live())


@pytest.mark.slow
def test_torch_can_be_imported_within_the_default_memory(pool_of):
    code = OBEDIENT + ("\n    def close(self):\n        import torch\n"
                       "        print('torch', float(torch.ones(9).sum()))\n")

    async def live():
        async with pool_of(code, timeout_s={"step": 60.0}) as pool:
            await (await pool.open({}, 0)).close()
            return pool.printed()

    assert asyncio.run(live()) == ["environments.mine: torch 9.0"]


def test_what_an_environment_starts_is_gone_when_its_process_is_stopped_killed_or_dead(pool_of, tmp_path):
    async def one(file, then):
        async with pool_of(processes=1, timeout_s={"step": 3.0}) as pool:
            environment = await pool.open({}, 0)
            code = f"fork({str(file)!r}, {then!r})"
            if then == "pass":
                await say(environment, code)
                assert not any(gone(int(pid)) for pid in file.read_text().split())
            else:
                with pytest.raises(EpisodeFailed):
                    await say(environment, code)
        pids = [int(pid) for pid in file.read_text().split()]
        assert len(pids) == (4 if then in ("pass", "time.sleep(600)") else 8), "a call in which it died is repeated"
        if then == keeper:  # what has another environment is not found without it
            for pid in (pids.pop(3), pids.pop(6)):
                os.kill(pid, signal.SIGKILL)
        assert all(map(gone, pids)), then

    keeper = "os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)"

    async def live():
        endings = ("pass", "time.sleep(600)", "os._exit(1)", "os.kill(0, 9)", keeper)
        await asyncio.gather(*(one(tmp_path / str(number), then) for number, then in enumerate(endings)))

    asyncio.run(live())


def test_a_chain_of_processes_that_start_the_next_one_is_ended(pool_of, tmp_path):
    """Each has another parent soon, and none lives for long."""
    beats = tmp_path / "beats"

    async def live():
        async with pool_of() as pool:
            await say(await pool.open({}, 0), f"chain({str(beats)!r})")
            await until(lambda: beats.exists() and beats.stat().st_size > 10)

    asyncio.run(live())
    size = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == size


def test_a_flood_without_end_is_killed_at_its_deadline(pool_of, capsys):
    async def live():
        async with pool_of(processes=1, timeout_s=SHORT) as pool:
            bad, other = [await pool.open({}, seed) for seed in (0, 1)]
            with pytest.raises(EpisodeFailed, match="gave no answer to step within 0.5 s"):
                await say(bad, "[flood() for _ in iter(int, 1)]")
            assert content(await say(other)) == "1:1"

    asyncio.run(live())
    assert len(capsys.readouterr().out) < 4_000_000


def test_thousands_of_open_files_are_the_failure_of_the_one_that_opens_them(pool_of):
    limit = "__import__('resource').setrlimit(7, (3000, 3000))"  # RLIMIT_NOFILE
    hoard = f"[{limit}, kept.extend(open(os.devnull) for _ in iter(int, 1))]"

    async def live():
        async with pool_of(OBEDIENT + "kept = []\n", processes=1) as pool:
            bad, other = [await pool.open({}, seed) for seed in (0, 1)]
            with pytest.raises(EpisodeFailed, match="ran out of files: OSError: .*open files") as caught:
                await say(bad, hoard)
            assert content(await say(other, "(open(os.devnull), None)[1]")) == "1:1" and other.interrupted == 1
            return caught.value.cause

    assert asyncio.run(live()) == "error_environment"


def test_a_flood_of_output_holds_nothing_up_and_is_cut(pool_of, capsys):
    async def live():
        async with pool_of(processes=1) as pool:
            environment, other = [await pool.open({}, seed) for seed in (0, 1)]
            answers = await asyncio.gather(say(environment, "flood()"), say(other))
            assert [content(answer) for answer in answers] == ["0:1", "1:1"]
            await environment.close()
            return pool.printed()

    assert sum(map(len, asyncio.run(live()))) < 2_200_000
    printed = capsys.readouterr().out
    assert 1_000_000 < len(printed) < 3_300_000 and "prints more than 1048576 bytes in a call" in printed


def test_a_done_episode_and_a_closed_one_take_no_steps(pool_of):
    async def live():
        async with pool_of() as pool:
            environment = await pool.open({}, 0)
            assert (await say(environment, "{'messages': [], 'done': True}")).done
            with pytest.raises(AssertionError, match="is done"):
                await say(environment)
            await environment.close()
            other = await pool.open({}, 0)
            await other.close()
            with pytest.raises(AssertionError, match="is closed"):
                await say(other)

    asyncio.run(live())


def test_many_episodes_share_two_processes(pool_of):
    async def live():
        async with pool_of() as pool:
            opened = await asyncio.gather(*(pool.open({}, seed) for seed in range(200)))
            for turn in (1, 2):
                steps = await asyncio.gather(*map(say, opened))
                assert [content(step) for step in steps] == [f"{seed}:{turn}" for seed in range(200)]
            assert len({step.info["pid"] for step in steps}) == 2
            await asyncio.gather(*(each.close() for each in opened))

    asyncio.run(live())


def test_isolated_episodes_have_a_process_each_that_ends_with_them(pool_of):
    async def live():
        async with pool_of(isolated=True) as pool:
            opened = await asyncio.gather(*(pool.open({}, seed) for seed in range(3)))
            pids = [int((await say(each)).info["pid"]) for each in opened]
            assert len(set(pids)) == 3
            await opened[0].close()
            await until(lambda: gone(pids[0]))
            assert not gone(pids[1]) and content(await say(opened[1])) == "1:2"

    asyncio.run(live())


def test_blocking_steps_block_nobody_else(pool_of):
    async def live():
        async with pool_of(processes=1) as pool:
            opened = [await pool.open({}, seed) for seed in range(20)]
            began = time.monotonic()
            await asyncio.gather(*(say(each, "time.sleep(0.3)") for each in opened))
            return time.monotonic() - began

    assert asyncio.run(live()) < 2.0, "one after the other they take 6 s"


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_cancelled_call_ends_at_its_limit_without_harm_to_its_neighbours(pool_of, where):
    async def live():
        async with pool_of(processes=1, timeout_s=SHORT) as pool:
            other = await pool.open({}, 1)
            await say(other)
            if where == "reset":
                call = asyncio.create_task(pool.open({"reset": "time.sleep(600)"}, 0))
            else:
                environment = await pool.open({}, 0)
                call = asyncio.create_task(say(environment, "time.sleep(600)"))
            await until(lambda: calls(pool) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            if where == "step":
                began = time.monotonic()
                await environment.close()
                assert time.monotonic() - began < 0.2, "it does not wait for a call that nobody waits for"
            assert content(await say(other)) == "1:2" and other.interrupted == 0
            await until(lambda: calls(pool) == 0)
            third = await pool.open({}, 2)
            assert content(await say(other)) == "1:3" and other.interrupted == 1
            assert content(await say(third)) == "2:1"

    asyncio.run(live())


def test_a_cancelled_call_that_ends_in_time_is_closed_and_kills_nothing(pool_of):
    async def live():
        async with pool_of(processes=1) as pool:
            other, environment = [await pool.open({}, seed) for seed in (1, 0)]
            call = asyncio.create_task(say(environment, "time.sleep(0.2)"))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: open_episodes(pool) == 1)
            third = await pool.open({}, 2)
            assert content(await say(other)) == "1:1" and content(await say(third)) == "2:1" and not other.interrupted
            return pool.printed()

    assert asyncio.run(live()) == ["environments.mine: 0 closes"]


def test_episodes_that_are_dropped_are_closed(pool_of):
    async def live():
        async with pool_of() as pool:
            for seed in range(6):
                environment = await pool.open({}, seed)
                await say(environment)
                del environment
            await until(lambda: open_episodes(pool) == 0)
            return pool.printed()

    assert sorted(asyncio.run(live())) == [f"environments.mine: {seed} closes" for seed in range(6)]


def test_stop_ends_everything_in_any_state(pool_of):
    async def live():
        async with pool_of(processes=2, timeout_s={"reset": 60.0, "step": 60.0}) as pool:
            idle, environment = [await pool.open({}, seed) for seed in (0, 1)]
            pids = [int((await say(each)).info["pid"]) for each in (idle, environment)]
            tasks = [asyncio.create_task(each) for each in (
                say(environment, "holds_the_lock()"), pool.open({"reset": "time.sleep(600)"}, 2))]
            await until(lambda: calls(pool) == 2)
            began = time.monotonic()
            await pool.stop()
            seconds = time.monotonic() - began
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(EpisodeFailed, match="was stopped"):
                await say(idle)
            await environment.close()
            return seconds, ends, pids

    seconds, ends, pids = asyncio.run(live())
    assert seconds < 3 and all(map(gone, pids))
    assert len(ends) == 2 and all(isinstance(end, EpisodeFailed) and "was stopped" in str(end) for end in ends)


@pytest.mark.parametrize("change", ["replayable = False", "def reset(self, row, seed):\n"
                                    "        self.row, self.seed, self.count = row, time.time(), 0\n"
                                    "        return {'messages': [{'role': 'user', 'content': str(self.seed)}]}\n"])
def test_a_neighbour_that_cannot_be_repeated_begins_again(pool_of, change):
    async def live():
        async with pool_of(OBEDIENT + f"    {change}", processes=1, timeout_s=SHORT) as pool:
            bad, other = [await pool.open({}, seed) for seed in (0, 1)]
            with pytest.raises(EpisodeFailed):
                await say(bad, "time.sleep(600)")
            with pytest.raises(ReplayDiverged) as caught:
                await say(other)
            await until(lambda: open_episodes(pool) == 0)
            return str(caught.value)

    said = asyncio.run(live())
    assert ("is neither replayable nor" in said) == ("replayable" in change)
    assert ("messages was" in said) == ("reset" in change)


def test_a_process_that_cannot_be_started_fails_the_episode_with_the_reason(pool_of, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def live():
        async with pool_of(processes=2) as pool:
            first = await pool.open({}, 0)
            with monkeypatch.context() as patch:
                patch.setattr("subprocess.Popen", refuse)
                with pytest.raises(EpisodeFailed, match=r"no process can be started.*unavailable.*ulimit") as caught:
                    await pool.open({}, 1)
            assert caught.value.cause == "error_environment" and content(await say(first)) == "0:1"
            assert content(await say(await pool.open({}, 2))) == "2:1"

    asyncio.run(live())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_process_that_dies_while_nothing_is_under_way_is_nobodys_fault(pool_of, new_loop):
    """Ray runs episode runners in loops of uvloop, which raises an error where a closed socket is written to."""
    async def live():
        async with pool_of(processes=1) as pool:
            opened = [await pool.open({}, seed) for seed in range(3)]
            pids = {int((await say(each)).info["pid"]) for each in opened}
            (pid,) = pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda: gone(pid))
            for process in pool._hosts._processes:
                process._process._writer.transport.abort()  # as when its end is reset
            steps = await asyncio.gather(*map(say, opened))
            assert [content(step) for step in steps] == ["0:2", "1:2", "2:2"]
            assert [each.interrupted for each in opened] == [1, 1, 1]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(live())


def test_an_episode_that_is_interrupted_again_and_again_gets_a_process_of_its_own(pool_of, monkeypatch):
    monkeypatch.setattr(open_episode, "INTERRUPTED_ALONE", 1)

    async def live():
        async with pool_of(processes=1, timeout_s=SHORT) as pool:
            patient, other = [await pool.open({}, seed) for seed in (0, 1)]
            for turn in (1, 2):
                with pytest.raises(EpisodeFailed):
                    await say(await pool.open({}, 9), "time.sleep(600)")
                pid = (await say(patient)).info["pid"]
                shared = (await say(await pool.open({}, 8))).info["pid"]
                assert (pid == shared) == (turn == 1)
            assert patient.interrupted == 2 and content(await say(other)) == "1:1"

    asyncio.run(live())


def test_a_fork_that_comes_back_does_not_answer_and_a_fork_that_stays_does_not_hide_the_end(pool_of):
    async def live():
        async with pool_of(processes=1, timeout_s={"step": 20.0}) as pool:
            environment, other = [await pool.open({}, seed) for seed in (0, 1)]
            assert content(await say(environment, "[os.fork(), time.sleep(0.1)][1]")) == "0:1"
            assert content(await say(environment)) == "0:2"
            began = time.monotonic()
            with pytest.raises(EpisodeFailed, match="ended its process with exit code 3"):
                await say(environment, "os._exit(3) if os.fork() else time.sleep(600)")
            assert time.monotonic() - began < 5 and content(await say(other)) == "1:1"

    asyncio.run(live())


def test_a_step_may_run_programs_from_a_coroutine(pool_of):
    code = OBEDIENT + """
async def program():
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    text = (await process.communicate())[0].decode()
    return {"messages": [{"role": "user", "content": text}]}
"""

    async def live():
        async with pool_of(code, processes=1) as pool:
            opened = [await pool.open({}, seed) for seed in range(3)]
            return [content(step) for step in await asyncio.gather(*(say(each, "program()") for each in opened))]

    assert asyncio.run(live()) == ["hi\n"] * 3


@pytest.mark.parametrize("code, name, said", [
    ("import no_such_module", "Counter",
     r"ModuleNotFoundError: No module named 'no_such_module'\n  .*mine\.py:1: import"),
    ("class Counter", "Counter", r"SyntaxError: .*\n  .*mine\.py:1: class Counter"),
    ("x = 1", "Counter", "AttributeError: module 'mine' has no attribute 'Counter'"),
    ("Counter = 5", "Counter", "TypeError: it is int 5, and must be a function or a list of functions with type hints"),
    ("raise SystemExit(3)", "Counter", "SystemExit: 3"),
    ("import os; os._exit(7)", "Counter", "ended its process with exit code 7 when it was imported"),
    ("x = bytearray(1 << 30)", "Counter", "MemoryError"),
    (f"{SENDS}('[' * 5000)", "Counter", r"sent what is no answer \(maximum recursion depth"),
    (f"{SENDS}('5')", "Counter", r"sent what is no answer \(.*int"),
])
def test_code_that_cannot_be_used_is_refused_with_the_field_and_the_reason(pool_of, code, name, said):
    async def live():
        async with pool_of(code, name, memory_mib=128):
            pass

    with pytest.raises(EnvironmentFailed, match=rf"^environments\.mine\.path: the environment '.*mine\.py:Counter' "
                                                rf"\(environments\.mine\) (cannot be used: )?{said}"):
        asyncio.run(live())


def test_an_import_that_hangs_is_killed_at_its_deadline_or_by_stop(pool_of, monkeypatch):
    monkeypatch.setattr(host_process, "IMPORT_S", 0.5)

    async def live():
        async with pool_of("import time; time.sleep(600)"):
            pass

    with pytest.raises(EnvironmentFailed, match=r"environments\.mine\.path: .* was not imported within 0.5 s"):
        asyncio.run(live())


def test_stop_ends_an_import_that_hangs(pool_of, tmp_path):
    hangs = tmp_path / "hangs"
    code = f"{OBEDIENT}\nif os.path.exists({str(hangs)!r}): time.sleep(600)\n"

    async def live():
        async with pool_of(code) as pool:
            first = await pool.open({}, 0)
            hangs.touch()
            second = asyncio.create_task(pool.open({}, 1))
            await asyncio.sleep(0.3)
            assert content(await say(first)) == "0:1" and not second.done()
            began = time.monotonic()
            await pool.stop()
            assert time.monotonic() - began < 3
            with pytest.raises(EpisodeFailed, match="was stopped"):
                await second

    asyncio.run(live())


def test_the_processes_and_what_they_have_started_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "mine.py").write_text(OBEDIENT)
    code = f"fork({str(tmp_path / 'pids')!r}, '')"
    script = (
        "import asyncio\nfrom rlhf_ray.config.environments import EnvironmentConfig\n"
        "from rlhf_ray.environments.pool import EnvironmentPool\nfrom rlhf_ray.environments.protocol import Reply\n"
        "async def live():\n"
        f"    pool = EnvironmentPool('mine', EnvironmentConfig(path='{tmp_path}/mine.py:Counter'))\n"
        "    await pool.start()\n    environment = await pool.open({}, 0)\n"
        f"    answer = await environment.step(Reply({code!r}))\n"
        "    print(int(answer.info['pid']), flush=True)\n"
        "    await environment.step(Reply('holds_the_lock()'))\nasyncio.run(live())"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()), *map(int, (tmp_path / "pids").read_text().split())]
    assert len(pids) == 5 and not any(map(gone, pids))
    parent.kill()
    parent.wait()
    asyncio.run(until(lambda: all(map(gone, pids))))
