"""Which processes count as those of a worker."""

import os
import subprocess
import sys

import psutil

from rlhf_ray.cluster.processes import descendants


def test_a_child_that_has_ended_and_was_not_waited_for_is_no_process_of_the_worker():
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
    try:
        found = {process.pid for process in descendants(psutil.Process())}
        assert living.pid in found and ended.pid not in found
    finally:
        living.communicate(b"\n")
        ended.wait()
