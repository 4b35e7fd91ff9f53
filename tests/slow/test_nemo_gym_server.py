"""A real resources server of NeMo-Gym, in an environment of its own: what is committed as its answers is what it
answers, and an episode gets its reward. Skipped where the package or a Python 3.12 for it cannot be had."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from tests.nemo_gym_wire import ANSWERS, ROW, talk
from tests.pages import ROOT

pytestmark = pytest.mark.slow
NEMO_GYM = "nemo-gym==0.4.0"
SERVER = ROOT / "configs/examples/adapters/nemo_gym_server.py"
INSTALL_S = 1800


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has the package, which needs Python 3.12."""
    place = tmp_path_factory.mktemp("nemo_gym") / "venv"
    python = place / "bin/python"
    if uv := shutil.which("uv"):
        commands = [[uv, "venv", "--quiet", "--python", "3.12", place],
                    [uv, "pip", "install", "--quiet", "--python", python, NEMO_GYM]]
    elif newer := shutil.which("python3.12"):
        commands = [[newer, "-m", "venv", place], [python, "-m", "pip", "install", "--quiet", NEMO_GYM]]
    else:
        pytest.skip("NeMo-Gym needs Python 3.12; there is neither python3.12 nor uv")
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            pytest.skip(f"{NEMO_GYM} cannot be installed here: {done.stderr[-300:]}")
    return python


@contextmanager
def running(python):
    """The URL of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, SERVER, str(port)])
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_the_committed_answers_are_those_of_a_real_server(python):
    with running(python) as url:
        found = {"nemo_gym": NEMO_GYM, "answers": talk(url)}
    if os.environ.get("NEMO_GYM_ANSWERS") == "write":
        ANSWERS.write_text(json.dumps(found, indent=1) + "\n")
    assert json.loads(ANSWERS.read_text()) == found


def test_sessions_are_apart_and_rewarded(python):
    async def play(pool, *items):
        environment = await pool.open({"prompt": "Buy tea.", **ROW}, seed=1)
        for item in items:
            step = await environment.step(Reply("", tool_calls=[ToolCall("buy", {"item": item}, "a")]))
            assert step.messages[0]["content"] == f'{{"bought":"{item}"}}'
        assert (await environment.step(Reply("Done.", content="Done."))).done
        return await environment.reward()

    async def all_of_them(url):
        pool = EnvironmentPool("shop", EnvironmentConfig(nemo_gym={"url": url}))
        try:
            await pool.start()
            return await asyncio.gather(play(pool, "tea"), play(pool, "rice"), play(pool), play(pool, "tea", "tea"),
                                        play(pool, "tea"))
        finally:
            await pool.stop()

    with running(python) as url:
        assert asyncio.run(all_of_them(url)) == [1.0, 0.0, 0.0, 0.0, 1.0]
