"""A user's function: what it may look like, and every way in which it can fail. Where the process itself matters it is
a real one; everything else goes the same way to the same code in a thread."""

import asyncio
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.errors import RewardError
from rlhf_ray.rewards import function_source, function_subprocess
from rlhf_ray.rewards.function_source import FunctionSource
from tests.gone import gone

TEXTS = ["one", "two words", "three words here"]


@pytest.fixture
def source(tmp_path):
    """source(code, name="score", timeout_s=20): the function of that name in a file with this code."""

    def build(code: str, name: str = "score", timeout_s: float = 20.0) -> FunctionSource:
        (tmp_path / "mine.py").write_text(code)
        return FunctionSource("mine", FunctionReward(
            type="function", function=f"{tmp_path}/mine.py:{name}", timeout_s=timeout_s))

    return build


@pytest.fixture
def requests(ask):
    return [ask(text, row, prompt=f"p{row}", metadata={"answer": row}, finish_reason=reason)
            for row, (text, reason) in enumerate(zip(TEXTS, ("stop", "length", "stop"), strict=True))]


class ThreadProcess:
    """In place of `subprocess.Popen`: what the process runs, in a thread of this one."""

    pid = 2**31 - 1
    """Of no process: what is killed by it is not there."""
    stdout = None

    def __init__(self, command, pass_fds, **_):
        channel = socket.socket(fileno=os.dup(pass_fds[0]))
        self._thread = threading.Thread(target=function_subprocess.serve, args=(channel,), daemon=True)
        self._thread.start()

    def poll(self):
        return None if self._thread.is_alive() else 0


@pytest.fixture
def in_a_thread(monkeypatch):
    """Functions are served by a thread. What they import is forgotten afterwards."""
    monkeypatch.setattr("subprocess.Popen", ThreadProcess)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in {"mine", "short", "rewarding", "rewarding.short"} - modules:
        sys.modules.pop(name, None)


def scores(source, requests, times=1):
    """The source's scores of one life: start, ask, stop."""

    async def live():
        try:
            await source.start()
            return [(await source.score(requests)).scores.tolist() for _ in range(times)][-1]
        finally:
            await source.stop()

    return asyncio.run(live())


@pytest.mark.parametrize("code, expected", [
    ("def score(prompts, responses, labels, finish_reasons):\n"
     "    return [len(p) + len(r.split()) + 10 * l['answer'] + 100 * (f == 'length')\n"
     "            for p, r, l, f in zip(prompts, responses, labels, finish_reasons)]", [3.0, 114.0, 25.0]),
    ("def score(responses): return [len(r.split()) for r in responses]", [1.0, 2.0, 3.0]),
    ("def score(*, labels, scale=2): return (scale * l['answer'] for l in labels)", [0.0, 2.0, 4.0]),
    ("def score(**given): return [len(given)] * len(given['prompts'])", [5.0] * 3),
    ("async def score(responses):\n    import asyncio\n    await asyncio.sleep(0)\n    return [True, 0, 0.5]",
     [1.0, 0.0, 0.5]),
    ("import numpy\ndef score(responses): return numpy.arange(3, dtype='float32')", [0.0, 1.0, 2.0]),
    ("class score:\n    def __new__(cls, responses): return [1, 2, 3]", [1.0, 2.0, 3.0]),
])
@pytest.mark.usefixtures("in_a_thread")
def test_what_a_function_may_look_like(source, requests, code, expected):
    assert scores(source(code), requests) == expected


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("code, expected", [
    ("def score(completions, **kwargs):\n    assert set(kwargs) == {'prompts', 'completion_ids', 'answer', 'level'}\n"
     "    assert kwargs['level'] == [None, 'hard', None]\n    return [len(c.split()) for c in completions]", [1, 2, 3]),
    ("def score(prompts, completions, answer, **kwargs) -> list[float]:\n"
     "    return [10 * a + len(c.split()) + 100 * (p == 'p1') for p, c, a in zip(prompts, completions, answer)]",
     [1, 112, 23]),
    ("def score(completions, answer): return answer", [0, 1, 2]),
    ("def score(prompts, level, **kwargs):\n"
     "    return [(c == 'two words') + 2 * (l == 'hard') for c, l in zip(kwargs['completions'], level)]", [0, 3, 0]),
    ("def score(completion_ids, **kwargs): return [sum(ids) for ids in completion_ids]", [4, 9, 15]),
    ("async def score(completions, level, other=7, **kwargs): return [other] * 3", [7, 7, 7]),
])
@pytest.mark.usefixtures("in_a_thread")
def test_a_function_for_trl_gets_completions_and_the_columns_of_the_rows(source, requests, code, expected):
    requests[1].metadata["level"] = "hard"
    assert scores(source(code), requests) == expected


@pytest.mark.usefixtures("in_a_thread")
def test_a_function_for_trl_gets_messages_where_the_prompt_is_messages(source, ask):
    code = (f"CHAT = {CHAT!r}\ndef score(prompts, completions, **kwargs):\n"
            "    assert prompts[0] == CHAT and prompts[1] == 'a prompt', prompts\n"
            "    assert completions == [[{'role': 'assistant', 'content': 'because'}], 'plain'], completions\n"
            "    return [1, 2]")
    chat = ask("because", prompt="<s>Be brief. Why?", messages=CHAT)
    assert scores(source(code), [chat, ask("plain")]) == [1, 2]


@pytest.mark.usefixtures("in_a_thread")
def test_our_own_arguments_are_texts_where_the_prompt_is_messages(source, ask):
    code = ("def score(prompts, responses, labels, **kwargs):\n"
            "    assert prompts == ['<s>Why?'] and responses == ['because'] and labels == [{'completions': 1}]\n"
            "    return [1]")
    assert scores(source(code), [ask("because", prompt="<s>Why?", messages=CHAT, metadata={"completions": 1})]) == [1]


def test_what_a_function_prints_is_shown_with_its_name_and_kept_once(source, requests, capfd):
    code = ("import sys\nprint('imported')\ndef score(responses):\n    print('to a person,', len(responses))\n"
            "    sys.stderr.write('and\\nmore')\n    return map(len, responses)")
    printing = source(code)
    assert scores(printing, requests) == [3.0, 9.0, 16.0]
    lines = [f"rewards.mine: {text}" for text in ("imported", "to a person, 3", "and", "more")]
    assert capfd.readouterr().out.splitlines() == lines
    assert printing.printed() == lines and printing.printed() == []


def test_what_a_function_prints_is_no_part_of_its_answer(source, requests):
    code = "def score(responses):\n    print('to a person, not to the protocol')\n    return map(len, responses)"
    assert scores(source(code), requests) == [3.0, 9.0, 16.0]


@pytest.mark.usefixtures("in_a_thread")
def test_the_function_keeps_its_state_and_its_event_loop_between_calls(source, requests):
    code = ("import asyncio\nloops, calls = set(), []\nasync def score(responses):\n"
            "    loops.add(id(asyncio.get_running_loop())); calls.append(1)\n"
            "    return [len(calls), len(loops), 0]")
    assert scores(source(code), requests, times=3) == [3.0, 1.0, 0.0]


def test_a_process_that_cannot_be_started_is_told_and_leaves_no_socket(source, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def live():
        mine = source("def score(responses): return []")
        with pytest.raises(RewardError, match=r"no process can be started for it: .*unavailable.*ulimit"):
            await mine.start()
        await mine.stop()
        await asyncio.sleep(0)  # the loop closes what the writer has closed
        return set(os.listdir("/proc/self/fd"))

    async def descriptors():
        return set(os.listdir("/proc/self/fd"))

    monkeypatch.setattr("subprocess.Popen", refuse)
    assert len(asyncio.run(live())) == len(asyncio.run(descriptors()))


@pytest.mark.usefixtures("in_a_thread")
def test_a_module_is_found_from_the_working_directory(tmp_path, monkeypatch, requests):
    (tmp_path / "rewarding").mkdir()
    (tmp_path / "rewarding/short.py").write_text("class By:\n    @staticmethod\n    def words(responses):\n"
                                                 "        return [len(r.split()) for r in responses]")
    monkeypatch.chdir(tmp_path)
    for function in ("rewarding.short:By.words", "rewarding/short.py:By.words"):
        config = FunctionReward(type="function", function=function)
        assert scores(FunctionSource("mine", config), requests) == [1.0, 2.0, 3.0]


SAMPLE = r"\n  prompt: '{}'\n  response: '{}'\n"
FIRST, SECOND, THIRD = (SAMPLE.format(f"p{row}", text) for row, text in enumerate(TEXTS))
NOT_FOUND = FIRST + r"  \(the first of 3 responses\)\n"


@pytest.mark.parametrize("code, said", [
    ("def score(responses): return [1 / (len(r) - 9) for r in responses]",
     r"failed: ZeroDivisionError: .*\n  .*mine\.py:1: def score\(responses\): return .*" + SECOND
     + "A missing score is never replaced by a default: fix the function$"),
    ("import json\ndef score(responses):\n\n    return [json.loads(r) for r in responses]",
     r"failed: JSONDecodeError: .*\n  .*mine\.py:4: return \[json\.loads\(r\) for r in responses\]" + FIRST),
    ("import sys\ndef score(responses): sys.exit(2)", r"failed: SystemExit: 2\n  .*mine\.py:2: def .*" + FIRST),
    ("def score(responses): assert len(responses) < 3", r"failed: AssertionError\n  .*mine\.py:1: .*" + NOT_FOUND),
    ("def score(responses): return [1, float('nan'), 2]",
     r"gave nan for 1 of 3 responses\n  .*mine\.py:1: def score\(responses\): .*" + SECOND),
    ("def score(responses): return [1, 2, float('-inf')]", r"gave -inf for 1 of 3 responses\n  .*" + THIRD),
    ("def score(responses): return [1e39, 2, 3]", r"gave inf for 1 of 3 responses\n  .*" + FIRST),
    ("import os\n\ndef score(responses): return [1, 2]",
     r"gave 2 scores for 3 responses; it must give one number for each\n  .*mine\.py:3: def score\(responses\): "),
    ("def score(responses): return 1.0", r"it returned float 1\.0, and must return a list with one number per "),
    ("def score(responses): return 'abc'", r"it returned str 'abc', and must return a list"),
    ("def score(responses): pass", r"it returned NoneType None, and must return a list"),
    ("def score(responses): return [1, None, 2]", r"score 1 of its list is NoneType None, and must be a number"),
    ("def score(responses): return [1, '2', 2]", r"score 1 of its list is str '2', and must be a number"),
    ("class Bad(Exception): sample = {1, 2}\ndef score(responses): raise Bad('set')", r"failed: Bad: set\n.*" + FIRST),
    ("class Bad(Exception): sample = 3\ndef score(responses): raise Bad('4th')", r"failed: Bad: 4th\n.*" + NOT_FOUND),
    ("class Bad(Exception): sample = 1\ndef score(responses): raise Bad", r"failed: Bad\n.*" + SECOND),
    ("async def score(responses): raise RuntimeError('no luck')", r"RuntimeError: no luck\n  .*mine\.py:1: async def"),
])
@pytest.mark.usefixtures("in_a_thread")
def test_what_goes_wrong_in_a_call_is_told_with_the_function_and_the_samples(source, requests, code, said):
    with pytest.raises(RewardError, match=rf"^the reward function '.*mine\.py:score' \(rewards\.mine\) .*{said}"):
        scores(source(code), requests)


def test_long_prompts_and_responses_are_shortened_and_a_chat_is_shown_by_its_messages(source, ask):
    messages = [{"role": "user", "content": "Why?"}]
    request = ask("a" * 5000 + " end", prompt="<|user|>Why?<|assistant|>", messages=messages)
    with pytest.raises(RewardError) as caught:
        scores(source("def score(responses): return [None]"), [request])
    assert "prompt: 'user: Why?'\n" in str(caught.value) and "a end'\n" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("code, said", [
    ("import os\ndef score(responses): os._exit(3)", rf"ended its process with exit code 3{NOT_FOUND}"),
    ("import os, signal\ndef score(responses): os.kill(os.getpid(), signal.SIGSEGV)", r"was killed by SIGSEGV\n"),
])
def test_a_process_that_ends_in_a_call_is_told_with_the_function_and_the_samples(source, requests, code, said):
    with pytest.raises(RewardError, match=rf"^the reward function '.*mine\.py:score' \(rewards\.mine\) .*{said}"):
        scores(source(code), requests)


@pytest.mark.parametrize("code, name, said", [
    ("import no_such_module_anywhere", "score", r"ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    ("\ndef score(responses) return", "score", r"SyntaxError: .*\n  .*mine\.py:2: def score\(responses\) return"),
    ("def other(responses): return []", "score", r"AttributeError: module 'mine' has no attribute 'score'"),
    ("score = 3", "score", r"TypeError: score is int 3, which cannot be called"),
    ("def score(responses, texts, n=1): pass", "score", r"TypeError: it requires texts; it is called with keyword "
     r"arguments from prompts, responses, .*; columns of the rows are in labels, or take completions instead"),
    ("def score(completions, trainer_state): pass", "score",
     r"it requires trainer_state; .* prompts, completions, completion_ids, and the columns of the prompts' rows"),
    ("def score(responses, /): pass", "score", r"it requires responses"),
    ("def score(): pass", "score", r"it takes none of prompts, responses, labels, finish_reasons"),
    ("raise SystemExit(1)", "score", r"SystemExit: 1"),
])
@pytest.mark.usefixtures("in_a_thread")
def test_what_cannot_be_used_is_told_at_the_start(source, requests, code, name, said):
    with pytest.raises(RewardError, match=said) as caught:
        asyncio.run(source(code, name).start())
    assert "(rewards.mine)" in str(caught.value) and "mine.py:score" in str(caught.value)


def test_a_process_that_ends_in_the_import_is_told(source):
    with pytest.raises(RewardError, match=r"\(rewards\.mine\) ended its process with exit code 7"):
        asyncio.run(source("import os; os._exit(7)").start())


@pytest.mark.parametrize("function, said", [
    ("/nowhere/mine.py:score", "no such file: /nowhere/mine.py"), ("no_such_module:score", "No module named"),
    ("just_a_name", "is not of the form module:name or file.py:name"), ("os:", "is not of the form"),
])
@pytest.mark.usefixtures("in_a_thread")
def test_names_that_lead_nowhere(function, said):
    with pytest.raises(RewardError, match=said):
        asyncio.run(FunctionSource("mine", FunctionReward(type="function", function=function)).start())


@pytest.mark.parametrize("block", [
    "import time; time.sleep(600)",
    "while True: pass",
    "import re; re.match('(a+)+$', 'a' * 60 + 'b')",  # holds the interpreter's lock
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
])
def test_a_function_that_blocks_is_killed_at_its_deadline(source, requests, block):
    blocked = source(f"def score(responses):\n    {block}\n    return [0] * 3", timeout_s=1.0)

    async def live():
        await blocked.start()
        (pid,) = processes()
        with pytest.raises(RewardError, match=rf"gave no answer within 1 s; its process was killed{NOT_FOUND}"):
            await blocked.score(requests)
        assert gone(pid)

    asyncio.run(live())


CHILDREN = """import subprocess, time
def score(responses):
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    shell = subprocess.Popen("setsid sleep 600 & echo $!", shell=True, stdout=subprocess.PIPE)
    pids = [child.pid for child in children] + [int(shell.stdout.readline())]
    open({file!r}, "w").write(" ".join(map(str, pids)))
    time.sleep({seconds})
    return [1, 2, 3]"""


@pytest.mark.parametrize("seconds", [600, 0], ids=["when it is killed", "when it is stopped"])
def test_what_a_function_starts_ends_with_it_in_sessions_of_its_own_too(source, requests, tmp_path, seconds):
    file = tmp_path / "pids"
    starting = source(CHILDREN.format(file=str(file), seconds=seconds), timeout_s=20.0 if not seconds else 5.0)

    async def live():
        await starting.start()
        if seconds:
            with pytest.raises(RewardError, match="gave no answer within"):
                await starting.score(requests)
        else:
            await starting.score(requests)
            assert not any(gone(int(pid)) for pid in file.read_text().split())
            await starting.stop()

    asyncio.run(live())
    pids, deadline = file.read_text().split(), time.monotonic() + 10
    while not all(gone(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 3 and all(gone(int(pid)) for pid in pids)


def test_a_flood_of_output_is_cut_and_holds_nothing_up(source, requests, capsys):
    flood = source("import os\ndef score(responses):\n    for _ in range(500):\n        os.write(1, b'x' * 100_000)\n"
                   "        os.write(2, b'y' * 100_000)\n    return [1, 2, 3]", timeout_s=60.0)

    async def live():
        await flood.start()
        scores = [(await flood.score(requests)).scores.tolist() for _ in range(2)]
        await flood.stop()
        return scores

    assert asyncio.run(live()) == [[1, 2, 3]] * 2
    printed = capsys.readouterr().out
    assert 1_000_000 < len(printed) < 2_300_000 and "prints more than 1048576 bytes in a call" in printed


def test_an_iterator_without_end_is_told_of(source, requests, in_a_thread):
    endless = source("import itertools\ndef score(responses):\n    return itertools.repeat(1.0)")

    async def live():
        await endless.start()
        with pytest.raises(RewardError, match="4 .*3"):
            await endless.score(requests)
        await endless.stop()

    asyncio.run(live())


def test_an_import_that_blocks_is_killed_at_its_deadline(source, monkeypatch):
    monkeypatch.setattr(function_source, "IMPORT_S", 1.0)
    with pytest.raises(RewardError, match=r"mine\.py:score' \(rewards\.mine\) gave no answer within 1 s when it was "):
        asyncio.run(source("import time; time.sleep(600)").start())


def test_a_wedged_call_does_not_hold_up_the_end(source, requests):
    wedged = source("def score(responses):\n    while True: pass", timeout_s=60.0)

    async def live():
        await wedged.start()
        (pid,) = processes()
        call = asyncio.create_task(wedged.score(requests))
        await asyncio.sleep(0.3)
        await wedged.stop()  # while the call goes on, which never ends
        assert gone(pid)
        with pytest.raises(RewardError, match="was killed by SIGKILL"):
            await call

    asyncio.run(live())


def test_after_a_crash_the_next_call_starts_a_new_process(source, requests, tmp_path):
    flag = tmp_path / "crashed"
    code = (f"import os\ndef score(responses):\n    if not os.path.exists({str(flag)!r}):\n"
            f"        open({str(flag)!r}, 'w').close()\n        os._exit(1)\n    return [1, 2, 3]")
    again = source(code)

    async def live():
        await again.start()
        with pytest.raises(RewardError, match="exit code 1"):
            await again.score(requests)
        try:
            return (await again.score(requests)).scores.tolist()
        finally:
            await again.stop()

    assert asyncio.run(live()) == [1.0, 2.0, 3.0]


def test_calls_wait_for_each_other(source, ask):
    code = ("import time\ndef score(responses):\n    time.sleep(0.05)\n    return [float(r) for r in responses]")
    one = source(code)

    async def live():
        await one.start()
        try:
            answers = await asyncio.gather(*(one.score([ask(str(i)), ask(str(i + 1))]) for i in range(5)))
        finally:
            await one.stop()
        return [a.scores.tolist() for a in answers]

    assert asyncio.run(live()) == [[i, i + 1] for i in range(5)]


def test_a_cancelled_call_leaves_no_answer_for_the_next(source, requests, ask):
    code = ("import time\ndef score(responses):\n    time.sleep(0.5 if 'one' in responses else 0)\n"
            "    return [len(responses)] * len(responses)")
    one = source(code)

    async def live():
        await one.start()
        call = asyncio.create_task(one.score(requests))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        try:
            return (await one.score([ask("x")])).scores.tolist()
        finally:
            await one.stop()

    assert asyncio.run(live()) == [1.0]


def test_the_process_dies_with_the_one_that_started_it(tmp_path):
    (tmp_path / "mine.py").write_text("def score(responses):\n    while True: pass")
    script = (
        "import asyncio, sys\nfrom rlhf_ray.rewards.function_source import KillableFunction\n"
        f"f = KillableFunction('f', '{tmp_path}/mine.py:score', ['responses'], 60)\n"
        "async def live():\n    await f.start()\n    print(f.pid, flush=True)\n"
        "    await f.call({'responses': ['x']}, ['x'])\nasyncio.run(live())"
    )

    async def live():
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        pid = int(await parent.stdout.readline())
        await asyncio.sleep(0.3)
        parent.kill()
        await parent.wait()
        return pid

    pid, until = asyncio.run(live()), time.monotonic() + 5
    while not gone(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert gone(pid)


def processes() -> list[int]:
    """Process ids of the functions that this process serves now."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"function_subprocess" in Path(f"/proc/{pid}/cmdline").read_bytes()]


RAISES = "raise RuntimeError('imported from the working directory')\n"


@pytest.mark.parametrize("name", ["math", "re", "json", "random", "asyncio", "sys", "numpy", "torch", "rlhf_ray"])
def test_a_file_may_be_named_like_a_module(tmp_path, monkeypatch, requests, name):
    """It gets the standard library's and the installed modules, and those beside it that are named otherwise."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / f"{name}.py").write_text(
        "import json, math, re, sys\nimport numpy\nimport helper\n"
        "def score(responses):\n"
        "    assert json.loads('[1]') == [1] and re.match('a', 'a') and sys.modules['math'] is math\n"
        "    return list(numpy.array([helper.size(r) for r in responses]) + math.sqrt(4))\n")
    (folder / "helper.py").write_text("import math, statistics\ndef size(text): return len(text) + math.cos(0)\n")
    for other in ("statistics", "socket", "pickle", "psutil"):
        (folder / f"{other}.py").write_text(RAISES)
        (tmp_path / f"{other}.py").write_text(RAISES)
    monkeypatch.chdir(tmp_path)
    mine = FunctionSource("mine", FunctionReward(type="function", function=f"rewards/{name}.py:score"))
    assert scores(mine, requests) == [6.0, 12.0, 19.0]


def test_what_a_file_defines_reaches_processes_that_it_starts(tmp_path, monkeypatch, requests):
    (tmp_path / "mine.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "def size(text): return len(text)\n"
        "def score(responses):\n"
        "    command = [sys.executable, 'tools/program.py']\n"
        "    program = subprocess.run(command, capture_output=True, text=True, check=True)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return [size + int(program.stdout) for size in pool.map(size, responses)]\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/program.py").write_text("import beside\nprint(beside.NUMBER)\n")
    (tmp_path / "tools/beside.py").write_text("NUMBER = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as in a worker
    mine = FunctionSource("mine", FunctionReward(type="function", function="mine.py:score"))
    assert scores(mine, requests) == [4.0, 10.0, 17.0]
