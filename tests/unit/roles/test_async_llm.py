"""The engine of vLLM's own processes: which processes it names."""

import os
import subprocess
import sys

from rlhf_ray.roles.engines.async_llm import AsynchronousEngine


def test_a_child_that_has_ended_and_was_not_waited_for_is_no_process_of_the_engine():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
    try:
        engine = object.__new__(AsynchronousEngine)  # without vLLM
        assert ended.pid not in engine.pids() and os.getpid() == engine.pids()[0]
    finally:
        ended.wait()
