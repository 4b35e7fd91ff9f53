"""The tool `python` in real environments: what the policy reads, and that no program harms the episode."""

import asyncio
import contextlib
import os
import signal

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.adapters import python as adapter
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import EnvironmentBroken, Reply, ToolCall
from rlhf_ray.environments.shapes import Episode, recognise
from rlhf_ray.errors import EnvironmentFailed
from rlhf_ray.user_code import sandbox_kernel as kernel
from rlhf_ray.user_code.sandbox import Outcome

needs_sandbox = pytest.mark.skipif(kernel.landlock_abi() < kernel.LEAST_ABI or bool(kernel.seccomp_problem()),
                                   reason="Landlock or seccomp is missing here")


@contextlib.asynccontextmanager
async def opened(**python):
    """(pool, an open episode)."""
    pool = EnvironmentPool("code", EnvironmentConfig(python=python, processes=1, timeout_s={"step": 30.0}))
    try:
        await pool.start()
        yield pool, await pool.open({}, seed=0)
    finally:
        await pool.stop()


def read(programs, **python):
    """What the policy reads of each program of one episode."""

    async def live():
        async with opened(**python) as (_, episode):
            return [await said(episode, program) for program in programs]

    return asyncio.run(live())


async def said(episode, program):
    step = await episode.step(Reply("", tool_calls=[ToolCall("python", {"code": program}, "1")]))
    return step.messages[0]["content"]


@needs_sandbox
def test_the_policy_reads_what_a_program_printed():
    said = read(["print(6 * 7)", "x = 1", "print(x)\nprint(y)"], timeout_s=10)
    assert said[0] == "42"
    assert said[1] == "(nothing was printed)"
    assert said[2].splitlines()[0] == "Traceback (most recent call last):"
    assert said[2].splitlines()[-1] == "NameError: name 'x' is not defined"  # each program is alone


@needs_sandbox
def test_with_keep_state_names_and_files_stay():
    said = read(["x = 1; open('a', 'w').write('b')", "print(x, open('a').read())", "1 / 0", "print(x)",
                 "import os; os._exit(3)", "print(x)"], keep_state=True)
    assert [said[i] for i in (0, 1, 3, 4)] == ["(nothing was printed)", "1 b", "1", "(ended with 3)"]
    assert said[2].endswith("ZeroDivisionError: division by zero")
    assert said[5].endswith("NameError: name 'x' is not defined")


@needs_sandbox
def test_a_program_has_its_time():
    assert read(["print(1, flush=True)\nwhile True: pass"], timeout_s=0.7) == [
        "1\n(killed: it did not end within 0.7 s)"]


@needs_sandbox
def test_programs_of_several_episodes_run_at_a_time():
    async def live(programs):
        async with opened(programs=programs) as (pool, first):
            second = await pool.open({}, seed=1)
            await asyncio.gather(said(first, "pass"), said(second, "pass"))  # the workers are started
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(said(each, "import time; time.sleep(1.5)") for each in (first, second)))
            return asyncio.get_running_loop().time() - began

    assert asyncio.run(live(1)) >= 3.0
    assert asyncio.run(live(2)) < 2.9


@needs_sandbox
def test_an_episode_with_state_is_brought_back_by_its_programs():
    """When its process is lost, they run again in a new interpreter."""
    async def live():
        async with opened(keep_state=True) as (pool, episode):
            assert await said(episode, "x = 5\nprint({'a', 'b', x})") != ""
            (process,) = pool._hosts._processes
            os.kill(process._process.pid, signal.SIGTERM)
            return await said(episode, "print(x)")

    assert asyncio.run(live()) == "5"


def told(longest=8000, **fields):
    given = {"status": 0, "killed": "", "verdict": None, "output": "", "errors": "", "seconds": 0.1}
    return adapter.shown(Outcome(**(given | fields)), 5.0, longest)


def test_the_middle_of_a_long_text_is_left_out():
    assert told(200, output="a" * 150 + "b" * 150) == f"{'a' * 100}\n... (100 characters) ...\n{'b' * 100}"


@pytest.mark.parametrize(("fields", "text"), [
    ({"killed": "disk"}, "(killed: its files became too large)"), ({"status": -9}, "(ended with -9)"),
    ({"killed": "output", "output": "x"}, "x\n(killed: it printed too much)"), ({"status": None, "output": "1\n"}, "1"),
    ({"errors": "\n".join(map(str, range(30)))}, "\n".join(map(str, range(18, 30)))),
])
def test_how_a_program_ended_is_said(fields, text):
    assert told(**fields) == text


@needs_sandbox
def test_a_sandbox_that_cannot_start_refuses_the_environment(monkeypatch, tmp_path):
    """The error names the environment, what is missing and what to do; here on a machine that says it is another."""
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'aarch64'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    async def live():
        async with opened():
            pass

    with pytest.raises(EnvironmentFailed, match=r"environments.code") as caught:
        asyncio.run(live())
    assert "seccomp, which holds programs back from the network" in str(caught.value)
    assert "sandbox.allow_missing: ['seccomp']" in str(caught.value)


def test_a_broken_sandbox_is_not_read_by_the_policy():
    """It is an error of the environment, in place of a tool's."""
    def python(code: str) -> str:
        """Runs.

        Args:
            code: it
        """
        raise EnvironmentBroken("no memory")

    episode = Episode(recognise(python), lambda function, *args, **kwargs: function(*args, **kwargs), lambda name: None)
    episode.start({}, 0)
    with pytest.raises(EnvironmentBroken):
        episode.step(Reply("", tool_calls=[ToolCall("python", {"code": "x"}, "1")]))


@needs_sandbox
def test_a_program_has_its_memory():
    assert read(["x = bytearray(1 << 28)"], sandbox={"memory_mib": 200})[0].endswith("MemoryError")
