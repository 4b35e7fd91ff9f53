"""Programs of responses are scored by the tests of their rows; a sandbox that does not work is an error."""

import asyncio
import json

import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import CodeReward
from rlhf_ray.errors import RewardError, SampleError
from rlhf_ray.rewards.code_source import program_of
from rlhf_ray.rewards.code_tests import read_tests, same_lines, same_value
from rlhf_ray.rewards.sources import make_source
from rlhf_ray.user_code import sandbox_kernel as kernel
from rlhf_ray.user_code.sandbox import SandboxBroken, SandboxPool

needs_sandbox = pytest.mark.skipif(kernel.landlock_abi() < kernel.LEAST_ABI or bool(kernel.seccomp_problem()),
                                   reason="Landlock or seccomp is missing here")


def block(program, before="Here it is:\n"):
    return f"{before}```python\n{program}\n```\nDone."


def scored(requests, **config):
    """(scores, failures)."""

    async def live():
        source = make_source("right", CodeReward(type="code", **config), ModelConfig(path="m"), 64)
        await source.start()
        try:
            answer = await source.score(requests)
            return answer.scores.tolist(), answer.failures
        finally:
            await source.stop()

    return asyncio.run(live())


# MBPP: a list of asserts. HumanEval: a program that defines check, and its call.
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 5) == 10\n\ncheck(add)"
# APPS: stdin and stdout; LiveCodeBench: arguments in JSON, a line each.
PAIRS = {"inputs": ["1 2\n", ["3", "4"], "5\n6"], "outputs": ["3\n", ["7"], "11.0"]}
CALLS = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", 7]}
GOOD, BAD = "def add(a, b): return a + b", "def add(a, b): return 3"
READS = "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)"


@needs_sandbox
@pytest.mark.parametrize(("tests", "program", "share"), [
    (ASSERTS, GOOD, 1.0), (ASSERTS, BAD, 1 / 3), (json.dumps(ASSERTS), GOOD, 1.0),
    (CHECK, GOOD, 1.0), (CHECK, BAD, 0.0), (CHECK, "x = = 1", 0.0),
    (PAIRS, READS, 1.0), (json.dumps(PAIRS), READS, 1.0), (PAIRS, "print(7)", 1 / 3), (PAIRS, "print(7); 1 / 0", 0.0),
    (CALLS, GOOD, 1.0), (CALLS, f"class Solution:\n    {GOOD.replace('(a', '(self, a')}", 1.0), (CALLS, BAD, 0.5),
    ({"asserts": ["assert add(1) == 3"], "setup": "TWO = 2"}, "def add(a): return a + TWO", 1.0),
], ids=range(14))
def test_the_share_of_tests_that_pass(ask, tests, program, share):
    assert scored([ask(block(program), metadata={"tests": tests})], score="share")[0] == pytest.approx([share])


@needs_sandbox
def test_by_default_all_tests_must_pass(ask):
    requests = [ask(block(each), i, metadata={"tests": ASSERTS}) for i, each in enumerate((GOOD, BAD))]
    assert scored(requests, right=2.0, wrong=-1.0)[0] == [2.0, -1.0]
    assert scored(requests, right=2.0, wrong=-1.0, score="share")[0] == [2.0, pytest.approx(0.0)]


@needs_sandbox
@pytest.mark.parametrize("cheat", [
    "import sys; sys.exit(0)", "import os; os._exit(0)", "def add(a, b): import os; os._exit(0)",
    "def add(a, b): raise SystemExit(0)", "print('passed'); raise SystemExit",
    "import os; os.kill(os.getppid(), 9)", "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'loaded\\n' + "
    "b'0' * 32 + b'\\n')\n    except OSError: pass",
    "import sys, builtins\nbuiltins.print = lambda *a: 1\nsys.exit()", "while True: pass",
    "import os\nwhile True: os.write(1, b'x' * 9999)", "x = bytearray(1 << 40)"])
def test_what_does_not_answer_is_wrong_and_no_error(ask, cheat):
    requests = [ask(block(cheat), i, metadata={"tests": tests}) for i, tests in enumerate((CHECK, PAIRS))]
    assert scored(requests, timeout_s=0.7, sandbox={"output_kib": 64})[0] == [0.0, 0.0]


@needs_sandbox
def test_expected_outputs_never_enter_the_sandbox(ask, monkeypatch):
    jobs, run = [], SandboxPool.run

    async def seen(pool, job):
        jobs.append(repr(job.request()))
        return await run(pool, job)

    monkeypatch.setattr(SandboxPool, "run", seen)
    pairs = {"inputs": ["1 2"], "outputs": ["expected-one"]}
    calls = {"fn_name": "add", "inputs": [["1", "2"]], "outputs": ['"expected-two"']}
    for tests in (pairs, calls):
        assert scored([ask(block(GOOD), metadata={"tests": tests})])[0] == [0.0]
    assert len(jobs) == 2 and not any("expected-" in job for job in jobs)


@needs_sandbox
def test_a_test_has_its_time_and_all_have_theirs(ask):
    slow = "import time\ntime.sleep(0.8)\n" + GOOD
    request = ask(block(slow), metadata={"tests": ASSERTS})
    assert scored([request], timeout_s=0.4)[0] == [0.0]
    assert scored([request], timeout_s=30.0)[0] == [1.0]
    assert scored([request], timeout_s=30.0, total_s=1.2, score="share")[0] == pytest.approx([1 / 3])


@needs_sandbox
def test_responses_are_run_side_by_side_while_others_are_served(ask):
    async def live():
        source = make_source("right", CodeReward(type="code", processes=3), ModelConfig(path="m"), 64)
        await source.start()
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0.02)
                beats += 1

        other = asyncio.create_task(beat())
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            slow = block("import time\ntime.sleep(1.5)\n" + GOOD)
            answer = await source.score([ask(slow, i, metadata={"tests": CHECK}) for i in range(3)])
            return answer.scores.tolist(), loop.time() - began, beats
        finally:
            other.cancel()
            await source.stop()

    scores, seconds, beats = asyncio.run(live())
    assert scores == [1.0, 1.0, 1.0] and seconds < 4.4 and beats > 20


@needs_sandbox
def test_a_response_without_a_program_is_wrong_and_counted(ask):
    texts = ["add is a + b", block(GOOD), "```\n" + GOOD + "\n```"]
    requests = [ask(text, i, metadata={"tests": CHECK}) for i, text in enumerate(texts)]
    assert scored(requests) == ([0.0, 1.0, 0.0], 2)
    assert scored([ask(GOOD, metadata={"tests": CHECK})], program="response") == ([1.0], 0)


@needs_sandbox
def test_another_column_has_the_tests(ask):
    assert scored([ask(block(GOOD), metadata={"cases": CHECK})], tests="cases")[0] == [1.0]


@pytest.mark.parametrize(("text", "program"), [
    (block("a") + block("b"), "b\n"), ("```py\na\n```", "a\n"), ("```python\na = 1", "a = 1"), ("```python\n```", None),
    ("<think>" + block("a") + "</think>" + block("b"), "b\n"), (block("a") + "</think> none", None),
    ("```text\na\n```", None),
    ("1. so\n   ```python\n   a\n   ```\n", "   a\n"),
])
def test_the_last_block_is_the_program(ask, text, program):
    assert program_of(ask(text), "last_block") == program


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("3\n", "3", True), ("3 ", " 3\n\n", True), ("3.0", "3", True), ("1 2.50", "1.0 2.5", True), ("3", "4", False),
    ("3\n4", "3", False), ("a  b", "a b", False), ("", "", True), ("NaN", "nan", False), ("sNaN 1", "1 1", False),
    ("50000000000000000", "50000000000000001", False), ("1e3", "1000", True), ("yes", "YES", False),
])
def test_lines_are_compared_as_livecodebench_does(printed, expected, same):
    """lcb_runner/evaluation/testing_util.py of LiveCodeBench, grade_stdio: the cases follow from its rules."""
    assert same_lines(printed, expected) is same


@pytest.mark.parametrize(("result", "expected", "same"), [
    ("[1, 2]", [1, 2], True), ("1", True, True), ("1.0", 1, True), ('"1"', 1, False), ("[" * 9999, [], False),
    ("x", 1, False)])
def test_results_are_compared_as_values(result, expected, same):
    assert same_value(result, expected) is same


@pytest.mark.parametrize(("tests", "words"), [
    (None, "tests are"), ([], "at least one"), ([" "], "none empty"), ("assert (", "no program"),
    ("METADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n    assert candidate(1) == 2",
     "add a call of it, such as check"),
    ("# assert f(1) == 2", "every program would pass"), (["assert f(1) == 2", "pass"], "every program would pass"),
    ({}, "inputs and outputs"),
    ({"inputs": ["1"], "outputs": []}, "same length"), ({"inputs": [1], "outputs": ["1"]}, "texts"),
    ({"inputs": ["1"], "outputs": ["1"], "more": 1}, "not 'more'"), ({"asserts": ["a"], "inputs": []}, "or inputs"),
    ({"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}, "in JSON a line"), (5, "tests are"),
    ({"fn_name": "f", "inputs": ["1"], "outputs": ["x"]}, "has quotes"), ({"fn_name": "a b", "inputs": ["1"],
     "outputs": ["1"]}, "name of a function"), ({"setup": 1, "asserts": ["a"]}, "setup must be text"),
])
def test_what_is_no_test_is_refused(tests, words):
    with pytest.raises(ValueError, match=words):
        read_tests(tests)


@needs_sandbox
def test_a_row_without_tests_is_an_error_not_a_wrong_program(ask):
    with pytest.raises(SampleError, match=r"rewards.right.tests='tests': epoch 0 row 0 sample 0"):
        scored([ask(block(GOOD), metadata={"answer": 1})])


def test_a_broken_sandbox_is_an_error_and_no_score(ask, monkeypatch):
    async def broken(pool, job):
        raise SandboxBroken("the sandbox is broken: no memory")

    async def started(pool):
        return {}

    monkeypatch.setattr(SandboxPool, "run", broken)
    monkeypatch.setattr(SandboxPool, "start", started)
    with pytest.raises(RewardError, match="no memory") as caught:
        scored([ask(block(GOOD), metadata={"tests": CHECK})])
    assert not isinstance(caught.value, SampleError)


def test_a_sandbox_that_cannot_start_is_an_error(monkeypatch):
    async def broken(pool):
        raise SandboxBroken("landlock is missing")

    monkeypatch.setattr(SandboxPool, "start", broken)
    with pytest.raises(RewardError, match="landlock is missing"):
        scored([])
