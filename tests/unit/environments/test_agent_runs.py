"""Agents in processes: how long they may take, what their failures are, and what is left of them."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from rlhf_ray.environments.agent_run import Pace
from rlhf_ray.environments.protocol import AgentSession
from rlhf_ray.environments.shapes import recognise
from rlhf_ray.errors import EnvironmentFailed, EpisodeFailed
from tests.unit.environments.conftest import calls, open_episodes, until

CODE = r'''
import asyncio, os, signal, subprocess, sys, time
from rlhf_ray.environments.protocol import Result

def agent(row, session):
    found = eval(row.get("code", "1"), globals(), {"row": row, "session": session})
    return found

async def waits(row, session):
    await asyncio.sleep(0)
    return await eval(row["code"], globals(), {"row": row, "session": session})

def spin():
    while True: pass
def touch(path): open(path, "w").close()
def once(path):
    """Dies in its first run."""
    if not os.path.exists(path):
        touch(path); os.kill(os.getpid(), 9)
    return 7
def throw(error): raise error

def two(row, session, other): return 1
def tool(row: int) -> int:
    """One.

    Args:
        row: what
    """
    return row
'''
SESSION = AgentSession("http://h/1/v1", "http://h/1", "key", "policy", 5, 100, 16)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Runs:
    """Runs of one pool."""

    def __init__(self, pool):
        self.pool = pool
        self.pace = Pace()
        self.begun = 0

    async def begin(self):
        self.begun += 1
        return SESSION

    async def run(self, code="1", **row):
        return await self.pool.run({"code": code, **row}, self.begin, self.pace)


def run_in(pool_of, body, name="agent", **given):
    async def live():
        async with pool_of(CODE, name, **given) as pool:
            return await body(Runs(pool))

    return asyncio.run(live())


def test_a_function_of_a_row_and_a_session_is_an_agent():
    def agent(row, session): ...
    async def also(row, session): ...
    def no(row, session, seed): ...

    for each in (agent, also):
        target = recognise(each)
        assert (target.shape, target.schemas) == ("agent", [])
    for each in (no, [agent], [agent, also]):
        with pytest.raises(TypeError, match="has no schema"):
            recognise(each)


@pytest.mark.parametrize("code, answer", [
    ("0.5", (0.5, {}, False)), ("True", (1.0, {}, False)), ("None", (None, {}, False)),
    ("{'reward': 2, 'info': {'a': 1, 'b': 'x'}}", (2.0, {"a": 1.0}, False)),
    ("Result(0.0, {'a': 2}, True)", (0.0, {"a": 2.0}, True)),
    ("session.seed", (5.0, {}, False)),
])
def test_what_an_agent_returns(pool_of, code, answer):
    found = run_in(pool_of, lambda runs: runs.run(code))
    assert (found["reward"], found["info"], found["truncated"]) == answer


def test_a_coroutine_is_run_to_its_end(pool_of):
    assert run_in(pool_of, lambda runs: runs.run("asyncio.sleep(0, 0.25)"), "waits")["reward"] == 0.25


@pytest.mark.parametrize("code, says", [
    ("'good'", "the agent returned str 'good'; it must return its reward as a number"),
    ("float('nan')", "the agent returned the reward nan"),
    ("{'rewards': 1}", "returned a dict with the key str 'rewards'"),
    ("Result('x')", "the agent returned the reward str 'x'"),
    ("Result(1, truncated='no')", "the agent returned truncated=str 'no'"),
    ("throw(KeyError('x'))", "failed: KeyError: 'x'\n"),
    ("throw(SystemExit(3))", "failed: SystemExit: 3"),
])
def test_what_fails_is_the_agent_s_failure_with_its_line(pool_of, code, says):
    with pytest.raises(EpisodeFailed) as failure:
        run_in(pool_of, lambda runs: runs.run(code))
    assert failure.value.cause == "error_agent" and says in str(failure.value)
    assert "the agent '" in str(failure.value) and "Fix the agent" in str(failure.value)
    if "throw" in code:
        assert "mine.py:" in str(failure.value) and "def throw(error): raise error" in str(failure.value)


@pytest.mark.parametrize("asked, field", [(False, "reset"), (True, "step")])
def test_an_agent_that_hangs_is_killed_and_its_neighbour_is_run_again(pool_of, asked, field):
    async def body(runs):
        other = Runs(runs.pool)
        other.pace.asks()  # its time does not pass
        neighbour = asyncio.ensure_future(other.run("time.sleep(1.2) or 3"))
        await until(lambda: calls(runs.pool) == 1)
        hangs = asyncio.ensure_future(runs.run("spin()"))
        await until(lambda: runs.begun == 1)
        if asked:
            runs.pace.asks()
            runs.pace.answered()
        with pytest.raises(EpisodeFailed, match="its process was killed") as failure:
            await hangs
        assert failure.value.cause == "error_timeout" and "while True: pass" in str(failure.value)
        assert f"environments.mine.timeout_s.{field}" in str(failure.value)
        assert ("had not asked the policy within 0.5 s" in str(failure.value)) == (not asked)
        assert (await neighbour)["reward"] == 3 and other.begun == 2

    run_in(pool_of, body, processes=1, timeout_s={"reset": 5.0 if asked else 0.5, "step": 0.5 if asked else 5.0})


def test_no_time_of_an_agent_passes_while_the_policy_writes(pool_of):
    async def body(runs):
        running = asyncio.ensure_future(runs.run("time.sleep(0.9) or 3"))
        await until(lambda: runs.begun == 1)
        runs.pace.asks()
        await asyncio.sleep(0.6)
        runs.pace.answered()
        assert (await running)["reward"] == 3

    run_in(pool_of, body, timeout_s={"reset": 0.5, "step": 0.5})


def test_requests_that_are_refused_give_an_agent_no_time(pool_of):
    async def body(runs):
        running = asyncio.ensure_future(runs.run("spin()"))
        await until(lambda: runs.begun == 1)
        began = time.monotonic()
        while not running.done():
            runs.pace.asks()
            runs.pace.answered(refused=True)
            await asyncio.sleep(0.02)
        assert 0.4 < time.monotonic() - began < 3
        with pytest.raises(EpisodeFailed, match=r"timeout_s\.step"):
            await running

    run_in(pool_of, body, timeout_s={"step": 0.5})


def test_an_agent_whose_process_dies_is_run_again_once_in_a_process_of_its_own(pool_of, tmp_path):
    async def body(runs):
        assert (await runs.run(f"once({str(tmp_path / 'once')!r})"))["reward"] == 7
        assert runs.begun == 2
        other = Runs(runs.pool)
        with pytest.raises(EpisodeFailed, match="was killed by SIGKILL, also when that was repeated in a process of "
                                                "its own. Fix the agent") as failure:
            await other.run("os.kill(os.getpid(), 9)")
        assert failure.value.cause == "error_agent" and other.begun == 2

    run_in(pool_of, body)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_run_that_nobody_waits_for_is_ended_in_the_background(pool_of, isolated):
    async def body(runs):
        running = asyncio.ensure_future(runs.run("spin()"))
        await until(lambda: calls(runs.pool) == 1)
        began = time.monotonic()
        running.cancel()
        await asyncio.wait([running])
        assert time.monotonic() - began < 0.3
        await until(lambda: open_episodes(runs.pool) == 0)
        assert (time.monotonic() - began > 0.5) != isolated, "others in its process are given time"
        assert (await runs.run("4"))["reward"] == 4

    run_in(pool_of, body, isolated=isolated, timeout_s={"step": 0.6})


# Programs


@pytest.fixture
def programs(tmp_path):
    """programs(script, row=None, **settings): what a run of a program gives, and its pool's lines."""
    from rlhf_ray.config.environments import EnvironmentConfig
    from rlhf_ray.environments.pool import EnvironmentPool

    def play(script, row=None, arguments=(), timeout_s=None, body=None, **settings):
        async def live():
            command = {"run": ["sh", "-c", script, "sh", *arguments], **settings}
            pool = EnvironmentPool("mine", EnvironmentConfig(command=command, timeout_s=timeout_s or {}))
            try:
                await pool.start()
                runs = Runs(pool)
                if body is not None:
                    return await body(runs)
                return await pool.run(row or {"question": "6 * 7", "price": 3}, runs.begin, runs.pace), pool.printed()
            finally:
                await pool.stop()

        return asyncio.run(live())

    return play


@pytest.mark.parametrize("reward, script, answer, info", [
    ("file", "echo 0.5 > reward.txt", 0.5, {}),
    ("file", """echo '{"reward": 2, "steps": 4, "by": "x"}' > reward.json""", 2.0, {"steps": 4.0}),
    ("file", "echo 0.5 > reward.txt; exit 3", 0.5, {}),
    ("stdout", "echo 9; echo 0.25; echo; echo no >&2", 0.25, {}),
    ("stdout", """echo '{"reward": true}'""", 1.0, {}),
    ("exit_code", "exit 0", 1.0, {}),
    ("exit_code", "exit 3", 0.0, {}),
    ("exit_code", "kill -9 $$", 0.0, {}),
    ("none", "echo 0.5 > reward.txt", None, {}),
])
def test_the_reward_of_a_program(programs, reward, script, answer, info):
    found, _ = programs(script, reward=reward)
    assert (found["reward"], found["info"]) == (answer, info)


@pytest.mark.parametrize("reward, script, says", [
    ("file", "echo working; echo on it >&2; exit 2",
     "ended with exit code 2, and left neither reward.json nor reward.txt"),
    ("file", "echo much > reward.txt", "its reward.txt holds no reward: str 'much'"),
    ("file", """echo '{"score": 1}' > reward.json""", "its reward.json holds no reward"),
    ("file", "ln -s /etc/hostname reward.txt", "left neither"),
    ("file", "mkfifo reward.txt; setsid sh -c 'exec 3<>reward.txt; sleep 9' & sleep 0.4", "holds no reward: str ''"),
    ("stdout", "echo done", "the last line that it printed is no reward: str 'done'"),
    ("stdout", "true", "it printed nothing"),
    ("none", "exit 4", "exit code 4"),
    ("file", "kill -9 $$", "was killed by SIGKILL"),
])
def test_a_program_without_a_reward_has_failed_and_says_what_it_printed(programs, reward, script, says):
    with pytest.raises(EpisodeFailed) as failure:
        programs(script, reward=reward)
    assert failure.value.cause == "error_agent" and says in str(failure.value)
    if "working" in script:
        shown = str(failure.value).splitlines()
        assert {"  working", "  on it"} <= set(shown)


def test_what_a_program_is_given(programs, tmp_path):
    script = """
        echo "$OPENAI_BASE_URL $OPENAI_API_KEY $ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY $RLHF_RAY_MODEL $RLHF_RAY_SEED"
        echo "$@"; cat "$RLHF_RAY_ROW"; echo; pwd; ls | wc -l; echo "$MINE"; echo 1 > reward.txt"""
    given = ["{question}", "{price}-{seed}", "{{x}}", '{"a": {"b": 1}}']
    _, lines = programs(script, arguments=given, variables={"MINE": "yes"})
    urls, arguments, row, place, files, mine = [line.removeprefix("environments.mine: ") for line in lines]
    assert urls == "http://h/1/v1 key http://h/1 key policy 5" and arguments == """6 * 7 3-5 {x} {"a": {"b": 1}}"""
    assert row == '{"question": "6 * 7", "price": 3}' and (files.strip(), mine) == ("0", "yes")
    assert not Path(place).exists() and not Path(place).parent.parent.exists(), "it is removed"


def test_a_program_has_neither_url_nor_keys_of_the_user_s_own_environment(programs, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
                 "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "https://api.own.org/v1")
    _, lines = programs("env | grep 'OPENAI\\|ANTHROPIC' | sort; echo 1 > reward.txt")
    assert [line.removeprefix("environments.mine: ") for line in lines] == [
        "ANTHROPIC_API_KEY=key", "ANTHROPIC_BASE_URL=http://h/1", "OPENAI_API_BASE=http://h/1/v1", "OPENAI_API_KEY=key",
        "OPENAI_BASE_URL=http://h/1/v1"]
    _, lines = programs('echo "$ANTHROPIC_AUTH_TOKEN"; echo 1 > reward.txt', variables={"ANTHROPIC_AUTH_TOKEN": "mine"})
    assert lines == ["environments.mine: mine"], "what is named is given"


def test_a_missing_column_and_a_missing_program_are_named(programs):
    with pytest.raises(EpisodeFailed, match=r"names the column 'cost', which the row lacks; its columns are question"):
        programs("true", arguments=["{cost}"])

    async def live():
        from rlhf_ray.config.environments import EnvironmentConfig
        from rlhf_ray.environments.pool import EnvironmentPool

        pool = EnvironmentPool("mine", EnvironmentConfig(command=["no-such-program"]))
        with pytest.raises(EnvironmentFailed, match=r"^environments\.mine\.command: .*there is no program 'no-such"):
            await pool.start()
        await pool.stop()

    asyncio.run(live())


def test_a_file_of_the_run_s_directory_is_found_from_the_program_s(programs, tmp_path, monkeypatch):
    (tmp_path / "here.txt").write_text("0.75")
    monkeypatch.chdir(tmp_path)
    found, _ = programs('cat "$1" > reward.txt', arguments=["here.txt"])
    assert found["reward"] == 0.75


@pytest.mark.parametrize("end", ["it ends", "it hangs", "nobody waits", "its process is killed"])
def test_nothing_is_left_of_a_program_and_what_it_has_started(programs, tmp_path, end):
    file = tmp_path / "pids"
    script = f"pwd > {file}.place; (sleep 600 & echo $! >> {file}; setsid sh -c 'echo $$ >> {file}; exec sleep 600' &" \
             f" sleep 0.2); echo 1 > reward.txt; {'true' if end == 'it ends' else 'sleep 600'}"

    async def body(runs):
        running = asyncio.ensure_future(runs.pool.run({}, runs.begin, runs.pace))
        await until(lambda: file.exists() and len(file.read_text().split()) == 2)
        pids = [int(pid) for pid in file.read_text().split()]
        if end == "nobody waits":
            running.cancel()
        if end == "its process is killed":
            [process] = [each for each in runs.pool._hosts._processes if each.episodes]
            os.kill(process._pid, 9)
            await until(lambda: runs.begun == 2)
            running.cancel()
        await asyncio.wait([running])
        if end == "it hangs":
            with pytest.raises(EpisodeFailed, match=r"timeout_s\.reset"):
                running.result()
        await until(lambda: not any(map(alive, pids)))
        place = Path(Path(f"{file}.place").read_text().strip())
        await until(lambda: not place.parent.parent.exists())

    programs(script, body=body, timeout_s={"reset": 1.5 if end == "it hangs" else 60})


def test_a_program_that_prints_without_end_is_bounded(programs):
    found, lines = programs(f"yes {'x' * 5000} | head -c 3000000; echo 1 > reward.txt")
    assert found["reward"] == 1 and 1 << 19 < sum(map(len, lines)) < 3 << 19
