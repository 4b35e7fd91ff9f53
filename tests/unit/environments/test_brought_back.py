"""An episode that lost its process or its runner is brought back: by its snapshot, by repeating what was done, or not
at all. In real processes."""

import asyncio
import base64
import os
import signal

import pytest

from rlhf_ray.environments import host_process
from rlhf_ray.environments.hosts import Hosts
from rlhf_ray.environments.open_episode import Played
from rlhf_ray.environments.protocol import Reply, ToolCall
from rlhf_ray.errors import EpisodeFailed, ReplayDiverged
from tests.gone import gone
from tests.unit.environments.conftest import OBEDIENT, calls, content, open_episodes, say, until

KEEPS = """
    def snapshot(self): return [self.row, self.seed, self.count]
    def restore(self, snapshot):
        self.row, self.seed, self.count = snapshot
        print("restored", snapshot, flush=True)
"""
KEEPS_BYTES = """
    async def snapshot(self): return bytes([self.seed, self.count])
    async def restore(self, snapshot):
        self.row, (self.seed, self.count) = {}, snapshot
        print("restored", type(snapshot).__name__, snapshot, flush=True)
"""
NOT_REPLAYABLE = "    replayable = False\n"
UNLESS = "None if os.path.exists({0!r}) else (open({0!r}, 'w').close(), os._exit(3))"
"""Ends the process, the first time."""
TILL = '''
class Till:
    """Adds up."""
    def reset(self, row_name, seed):
        self.sum = seed
        print("reset", flush=True)
        return f" at {row_name}"
    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: what
        """
        self.sum += number
        return self.sum
    def get_reward(self): return self.sum
'''
TILL_KEEPS = "    def snapshot(self): return {'sum': self.sum}\n    def restore(self, kept): self.sum = kept['sum']\n"


def fields(step):
    """A step as it is in a journal."""
    return dict(vars(step))


def printed(pool):
    """What the environments of a stopped pool have printed, but for their ends."""
    return [line.removeprefix("environments.mine: ") for line in pool.printed() if not line.endswith("closes")]


async def played_of(environment, *codes):
    """What was played, as another process would get it."""
    steps = []
    for code in codes:
        steps.append((Reply(code), fields(await say(environment, code))))
    start = {**vars(environment.start), "observation": environment.observation}
    return Played(start, steps, environment.snapshot)


@pytest.mark.parametrize("keeps, kept, seen", [
    (KEEPS, {"json": [{"a": 1}, 5, 2]}, "restored [{'a': 1}, 5, 2]"),
    (KEEPS_BYTES, {"base64": base64.b64encode(bytes([5, 2])).decode()}, r"restored bytes b'\x05\x02'"),
])
@pytest.mark.parametrize("replayable", [True, False])
def test_an_episode_of_another_runner_goes_on_from_its_snapshot(pool_of, keeps, kept, seen, replayable):
    code = OBEDIENT + keeps + ("" if replayable else NOT_REPLAYABLE)

    async def live():
        async with pool_of(code) as pool:
            assert (await pool.start()).restorable
            played = await played_of(await pool.open({"a": 1}, 5), "", "")
            assert played.snapshot == kept
        async with pool_of(code) as pool:
            environment = await pool.open({"a": 1}, 5, played=played)
            assert environment.start.messages[0]["content"] == "5:0" and environment.snapshot == kept
            assert content(await say(environment)) == "5:3" and environment.interrupted == 0
            assert environment.snapshot != kept, "the newest"
        return printed(pool)

    assert asyncio.run(live()) == [seen]


def test_an_episode_of_another_runner_is_repeated_if_it_has_no_snapshot(pool_of):
    async def live():
        async with pool_of() as pool:
            assert not (await pool.start()).restorable
            played = await played_of(await pool.open({"a": 1}, 5), "print('one')", "print('two')")
            assert played.snapshot is None
        async with pool_of() as pool:
            environment = await pool.open({"a": 1}, 5, played=played)
            assert content(await say(environment)) == "5:3" and environment.interrupted == 0
        return printed(pool)

    assert asyncio.run(live()) == ["one", "two"]


@pytest.mark.parametrize("code, change, said", [
    (OBEDIENT + NOT_REPLAYABLE, lambda played: played,
     r"lost its runner, and is neither replayable nor has it snapshot\(\) and restore\(snapshot\)"),
    (OBEDIENT, lambda played: Played(played.start, [(reply, {**answer, "reward": 7.0}) for reply, answer in
                                                    played.steps]),
     r"lost its runner, and answered step 0 differently when it was repeated: reward was 7.0 and is 1.0"),
    (OBEDIENT, lambda played: Played({**played.start, "observation": "x"}, played.steps),
     "answered reset differently when it was repeated: observation was \"x\" and is \"\""),
])
def test_an_episode_of_another_runner_that_cannot_be_brought_back_begins_again(pool_of, code, change, said):
    async def live():
        async with pool_of(code) as pool:
            played = change(await played_of(await pool.open({}, 5), ""))
            await until(lambda: open_episodes(pool) == 0)
            try:
                await pool.open({}, 5, played=played)
            finally:
                await until(lambda: open_episodes(pool) == 0)

    with pytest.raises(ReplayDiverged, match=said):
        asyncio.run(live())


def test_the_reward_of_an_ended_episode_of_another_runner_is_that_of_its_snapshot(pool_of):
    call = Reply("a call", tool_calls=[ToolCall("add", {"number": 4})])

    async def live():
        async with pool_of(TILL + TILL_KEEPS, "Till") as pool:
            facts = await pool.start()
            assert [tool["function"]["name"] for tool in facts.tools] == ["add"] and facts.restorable
            environment = await pool.open({"row_name": "A"}, 3)
            steps = [(reply, fields(await environment.step(reply))) for reply in (call, Reply("done"))]
            played = Played({**vars(environment.start), "observation": environment.observation}, steps,
                            environment.snapshot)
            again = await pool.open({"row_name": "A"}, 3, played=played)
            assert again.observation == " at A" and await again.reward() == 7.0
            with pytest.raises(AssertionError, match="is done"):
                await again.step(call)
        return printed(pool)

    assert asyncio.run(live()) == ["reset"]


@pytest.mark.parametrize("code, where", [
    (OBEDIENT, "step"), (OBEDIENT, "reset"), (OBEDIENT + KEEPS + NOT_REPLAYABLE, "step"),
    (OBEDIENT + NOT_REPLAYABLE, "reset"),
])
@pytest.mark.parametrize("isolated", [True, False])
def test_a_call_in_which_a_process_died_once_is_repeated(pool_of, tmp_path, code, where, isolated):
    dies = UNLESS.format(str(tmp_path / "died"))

    async def live():
        async with pool_of(code, processes=1, isolated=isolated) as pool:
            other = await pool.open({}, 1)
            environment = await pool.open({"reset": dies} if where == "reset" else {}, 5)
            if where == "step":
                assert content(await say(environment)) == "5:1"
                step = await say(environment, dies)
                assert content(step) == "5:2" and environment.interrupted == 1
            assert (tmp_path / "died").exists()
            step = await say(environment)
            assert content(step) == ("5:3" if where == "step" else "5:1")
            if not isolated:
                assert not [each for each in pool._hosts._processes if each.alone], "others may join it again"
            await other.close()

    asyncio.run(live())


def test_each_call_may_lose_a_process_once(pool_of, tmp_path):
    async def live():
        async with pool_of(processes=1) as pool:
            environment = await pool.open({"reset": UNLESS.format(str(tmp_path / "0"))}, 5)
            for turn in (1, 2, 3):
                step = await say(environment, UNLESS.format(str(tmp_path / str(turn))))
                assert content(step) == f"5:{turn}" and environment.interrupted == turn

    asyncio.run(live())


def test_a_step_in_which_the_process_dies_fails_at_once_if_it_cannot_be_brought_back(pool_of):
    async def live():
        async with pool_of(OBEDIENT + NOT_REPLAYABLE) as pool:
            await say(await pool.open({}, 5), "os._exit(3)")

    with pytest.raises(EpisodeFailed, match=r"exit code 3 in step, which is not repeated, since it is neither "
                                            r"replayable nor has it snapshot\(\)") as caught:
        asyncio.run(live())
    assert caught.value.cause == "error_environment"


def test_a_process_that_ends_otherwise_when_a_call_is_repeated_is_described_with_both_endings(pool_of, tmp_path):
    file = str(tmp_path / "died")
    code = f"os._exit(4) if os.path.exists({file!r}) else (open({file!r}, 'w').close(), ctypes.string_at(0))"

    async def live():
        async with pool_of() as pool:
            await say(await pool.open({}, 5), code)

    with pytest.raises(EpisodeFailed, match=r"ended its process with exit code 4 in step, also when that was repeated "
                                            r"in a process of its own \(before that, it was killed by SIGSEGV\)"):
        asyncio.run(live())


def test_a_neighbour_of_a_killed_process_is_restored_and_not_repeated(pool_of):
    async def live():
        async with pool_of(OBEDIENT + KEEPS, processes=1, timeout_s={"step": 0.5}) as pool:
            bad, other = [await pool.open({}, seed) for seed in (0, 1)]
            assert content(await say(other, "print('once')")) == "1:1"
            with pytest.raises(EpisodeFailed):
                await say(bad, "time.sleep(600)")
            assert content(await say(other)) == "1:2" and other.interrupted == 1
        return printed(pool)

    assert asyncio.run(live()) == ["once", "restored [{}, 1, 1]"]


@pytest.mark.parametrize("keeps, said", [
    ("def snapshot(self): return (1, 2)", r"snapshot returned tuple \(1, 2\), which JSON gives back changed"),
    ("def snapshot(self): return 1 / 0", "ZeroDivisionError: division by zero\n  .*return .*1 / 0"),
    ("def snapshot(self): return b'x' * (13 << 20)", "snapshot returned bytes of 18175320 bytes as JSON"),
])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_snapshot_that_cannot_be_kept_fails_the_episode(pool_of, keeps, said, where):
    if where == "step":
        keeps = keeps.replace("return ", "return self.count and ")
    code = OBEDIENT + f"    {keeps}\n    def restore(self, snapshot): pass\n"

    async def live():
        async with pool_of(code) as pool:
            await say(await pool.open({}, 0))

    with pytest.raises(EpisodeFailed, match=f"failed in {where}: (.|\n)*{said}") as caught:
        asyncio.run(live())
    assert caught.value.cause == "error_environment"


@pytest.mark.parametrize("does, said", [
    ("1 / 0", "failed in restore: ZeroDivisionError"),
    ("time.sleep(600)", r"gave no answer to restore within 0.5 s(.|\n)*timeout_s\.reset"),
    ("os._exit(3)", "exit code 3 in restore, also when that was repeated"),
])
def test_an_episode_whose_restore_fails_begins_again(pool_of, does, said):
    code = OBEDIENT + KEEPS + f"        {does}\n"

    async def live():
        async with pool_of(code, timeout_s={"reset": 0.5}) as pool:
            played = await played_of(await pool.open({}, 5), "")
            await pool.open({}, 5, played=played)

    with pytest.raises(ReplayDiverged, match=f"lost its runner and cannot be brought back(.|\\n)*{said}"):
        asyncio.run(live())


def test_a_step_during_which_the_process_is_stopped_is_repeated_once(pool_of, monkeypatch, tmp_path):
    monkeypatch.setattr(host_process, "ANSWERING_S", 0.3)
    stops = "[os.kill(os.getpid(), signal.SIGSTOP), time.sleep(600)]"  # another thread may take the signal
    once = UNLESS.format(str(tmp_path / "stopped")).replace("os._exit(3)", stops)

    async def live():
        async with pool_of(processes=1, timeout_s={"step": 1.0}) as pool:
            environment = await pool.open({}, 5)
            assert content(await say(environment)) == "5:1"
            assert content(await say(environment, once)) == "5:2" and environment.interrupted == 1
            with pytest.raises(EpisodeFailed, match=r"within 1 s(.|\n)*its process is stopped") as caught:
                await say(environment, stops)
            assert caught.value.cause == "error_timeout" and environment.interrupted == 2

    asyncio.run(live())


def test_a_process_that_is_killed_during_a_step_costs_nothing(pool_of):
    async def live():
        async with pool_of(processes=1) as pool:
            environment = await pool.open({}, 5)
            pid = int((await say(environment)).info["pid"])
            step = asyncio.create_task(say(environment, "time.sleep(0.3)"))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: gone(pid))
            assert content(await step) == "5:2" and environment.interrupted == 1

    asyncio.run(live())


def suspect(*opened):
    """Their process has died once before, while all of these had a call under way."""
    for each in opened:
        each._episode._died_before = True


async def interrupted_in(pool, pid, calls_of):
    """Tasks of calls that were under way together when their process was killed."""
    tasks = [asyncio.create_task(call) for call in calls_of]
    await until(lambda: calls(pool) == len(tasks))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: calls(pool) < len(tasks))
    return tasks


@pytest.mark.parametrize("processes", [1, 2])
def test_calls_whose_process_is_killed_once_are_repeated_together(pool_of, monkeypatch, processes):
    """As by the kernel, for lack of memory, or by a person."""
    started = []
    start = Hosts._new

    def new(hosts):
        started.append(len(hosts._processes) + 1)
        return start(hosts)

    async def live():
        async with pool_of(processes=processes, timeout_s={"step": 20.0}) as pool:
            opened = [await pool.open({}, seed) for seed in range(12)]
            pids = {int((await say(each)).info["pid"]) for each in opened}
            assert len(pids) == processes
            monkeypatch.setattr(Hosts, "_new", new)
            tasks = [asyncio.create_task(say(each, "time.sleep(0.5)")) for each in opened]
            await until(lambda: calls(pool) == len(tasks))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            steps = await asyncio.wait_for(asyncio.gather(*tasks), 8)
            assert [content(step) for step in steps] == [f"{seed}:2" for seed in range(12)]
            assert [each.interrupted for each in opened] == [1] * 12

    asyncio.run(live())
    assert len(started) == processes and max(started) <= processes


@pytest.mark.parametrize("processes", [1, 2])
def test_calls_that_lost_one_process_are_repeated_in_as_many_at_a_time_as_are_configured(
        pool_of, monkeypatch, processes):
    alone = []
    enter = Hosts.enter

    def entered(hosts, number, own):
        process = enter(hosts, number, own)
        alone.append(sum(each.alone for each in hosts._processes))
        return process

    async def live():
        async with pool_of(processes=1, timeout_s={"step": 60.0}) as pool:
            opened = [await pool.open({}, seed) for seed in range(12)]
            pid = int((await say(opened[0])).info["pid"])
            pool._hosts.turns = asyncio.Semaphore(processes)
            suspect(*opened)
            monkeypatch.setattr(Hosts, "enter", entered)
            steps = await asyncio.gather(*await interrupted_in(
                pool, pid, [say(each, "time.sleep(0.5)") for each in opened]))
            assert [content(step) for step in steps] == ["0:2", *(f"{seed}:1" for seed in range(1, 12))]
            assert [each.interrupted for each in opened] == [1] * 12
            assert not pool._hosts.turns.locked() and not any(each.alone for each in pool._hosts._processes)

    asyncio.run(live())
    assert len(alone) == 12 and max(alone) == processes


def test_a_call_that_waits_for_its_turn_may_be_cancelled(pool_of):
    async def live():
        async with pool_of(processes=1) as pool:
            opened = [await pool.open({}, seed) for seed in range(3)]
            pid = int((await say(opened[0])).info["pid"])
            suspect(*opened)
            first, waits, last = await interrupted_in(pool, pid, [say(each, "time.sleep(1)") for each in opened])
            await until(lambda: calls(pool) == 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await waits
            assert not first.done() and not last.done() and opened[1].interrupted == 0
            assert content(await first) == "0:2" and content(await last) == "2:1"

    asyncio.run(live())


@pytest.mark.parametrize("end", ["cancel", "close", "fail"])
def test_an_episode_that_ends_in_its_turn_lets_the_next_one_have_it(pool_of, tmp_path, end):
    began = tmp_path / "began"
    repeated = "1 / 0" if end == "fail" else "time.sleep(1)"
    code = f"{repeated} if os.path.exists({str(began)!r}) else (open({str(began)!r}, 'x').close(), time.sleep(600))"

    async def live():
        async with pool_of(processes=1, timeout_s={"step": 3.0}) as pool:
            ends, other = [await pool.open({}, seed) for seed in range(2)]
            pid = int((await say(other)).info["pid"])
            tasks = [asyncio.create_task(say(ends, code)), asyncio.create_task(say(other, "time.sleep(1)"))]
            await until(began.exists)
            suspect(ends, other)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: calls(pool) == 0)
            await until(lambda: calls(pool) == 1)
            if end == "fail":
                with pytest.raises(EpisodeFailed, match="ZeroDivisionError"):
                    await tasks[0]
            else:
                tasks[0].cancel()
            if end == "close":
                await ends.close()
            assert content(await asyncio.wait_for(tasks[1], 20)) == "1:2"
            await until(lambda: open_episodes(pool) == 1)

    asyncio.run(live())
