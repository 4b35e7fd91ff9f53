"""A role of no weight: it answers at once, late, or never."""

import os
import subprocess
import time

from rlhf_ray.errors import WorkerBroken


class Sleeper:
    """Answers at once, late, or never; may have a process of its own."""

    def __init__(self, rank, children):
        self.rank, self.children = rank, children

    def start(self):
        self.started = [subprocess.Popen(["sleep", "600"]) for _ in range(self.children)]
        return self.rank

    def echo(self, value):
        return value, os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)

    def leave(self):
        os._exit(3)

    def cannot(self):
        raise WorkerBroken("no engine any more")
