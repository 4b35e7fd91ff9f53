"""Pools of environments in real processes, and an environment that does whatever a reply says."""

import asyncio
import contextlib

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply

OBEDIENT = r'''
import asyncio, ctypes, os, re, signal, struct, subprocess, sys, time

class Strange(Exception):
    """Can be neither pickled nor shown."""
    def __init__(self): self.lock = open(os.devnull)
    def __str__(self): raise RuntimeError("no text")

class Deep(BaseException): pass

async def forever(): await asyncio.Event().wait()
def spin():
    while True: pass
def holds_the_lock(): re.match("(a+)+$", "a" * 60 + "b")
def hog(kept=[]):
    while True: kept.append(bytearray(1 << 20))
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); time.sleep(600)
def fork(file, then):
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    pids = [child.pid for child in children]
    for program in ("setsid sleep 600", "env -i setsid sleep 600"):
        shell = subprocess.Popen(f"{program} & echo $!", shell=True, stdout=subprocess.PIPE)
        pids.append(int(shell.stdout.readline()))
    open(file, "a").write(" ".join(map(str, pids)) + " ")
    exec(then)
def chain(file):
    """Processes that live for a moment each, and start the next one before they end."""
    if os.fork(): return
    os.setsid()
    while os.fork() == 0:
        with open(file, "a") as beats: beats.write(".")
        time.sleep(0.003)
    os._exit(0)
def flood():
    for _ in range(200): os.write(1, b"x" * 100_000)
def throw(error): raise error
def nested(levels):
    value = []
    for _ in range(levels - 1): value = [value]
    return value
def sends(frame):
    """Answers in place of the process that it is in, and hangs."""
    os.write(3, struct.pack("!Q", len(frame)) + frame.encode()); time.sleep(600)

class Counter:
    """Answers "SEED:COUNT" to each reply, after it has run the reply as code."""
    def reset(self, row, seed):
        self.row, self.seed, self.count = row, seed, 0
        self.do(row.get("reset", ""))
        return {"messages": [{"role": "user", "content": f"{seed}:0"}]}
    async def step(self, reply):
        self.count += 1
        content = f"{self.seed}:{self.count}"
        answer = {"messages": [{"role": "user", "content": content}], "reward": self.count}
        answer["info"] = {"pid": os.getpid()}
        found = self.do(reply.text)
        if asyncio.iscoroutine(found): found = await found
        return answer if found is None else found
    def close(self):
        sys.stdout.write(f"{self.seed} closes\n")  # print would write twice, and threads could mix
        self.do(self.row.get("close", ""))
    def do(self, code):
        if not code: return
        return eval(code, globals())
'''
LIMITS = {"reset": 5.0, "step": 5.0}


@pytest.fixture
def pool_of(tmp_path):
    """pool_of(code=OBEDIENT, name="Counter", **config): an open pool, as an asynchronous context manager."""

    @contextlib.asynccontextmanager
    async def build(code=OBEDIENT, name="Counter", **given):
        (tmp_path / "mine.py").write_text(code)
        limits = {**LIMITS, **given.pop("timeout_s", {})}
        pool = EnvironmentPool("mine", EnvironmentConfig(path=f"{tmp_path}/mine.py:{name}", timeout_s=limits, **given))
        try:
            await pool.start()
            yield pool
        finally:
            await pool.stop()

    return build


def content(step):
    """The text of its only message."""
    (message,) = step.messages
    return message["content"]


async def say(environment, code=""):
    """One step with a reply that is this code."""
    return await environment.step(Reply(code))


def calls(pool):
    """How many calls of user code are under way."""
    return sum(each.calls for each in pool._hosts._processes)


def open_episodes(pool):
    """How many episodes have a process."""
    return sum(len(each.episodes) for each in pool._hosts._processes)


async def until(holds, patience_s=5.0):
    """Wait for a condition."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while not holds():
        assert loop.time() < deadline, "it did not become true"
        await asyncio.sleep(0.01)
