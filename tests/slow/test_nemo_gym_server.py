"""A real resources server of NeMo-Gym, in an environment of its own: what is committed as its answers is what it
answers, and an episode gets its reward. Skipped where the package or a Python 3.12 for it cannot be had."""

import asyncio
import json
import os
from contextlib import contextmanager

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from tests.nemo_gym_wire import ANSWERS, ROW, talk
from tests.pages import ROOT
from tests.slow.packages import python_with, serving

pytestmark = pytest.mark.slow
NEMO_GYM = "nemo-gym==0.4.0"
SERVER = ROOT / "configs/examples/adapters/nemo_gym_server.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has the package, which needs Python 3.12."""
    return python_with(NEMO_GYM, tmp_path_factory.mktemp("nemo_gym") / "venv", "3.12")


@contextmanager
def running(python):
    """The URL of a server."""
    with serving([python, SERVER]) as port:
        yield f"http://127.0.0.1:{port}"


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
