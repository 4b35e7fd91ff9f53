"""Ray's own record of calls, where it keeps one (`logging.task_events`)."""

from pathlib import Path

import ray


def write_timeline(path: Path) -> None:
    """Write the calls of all workers that Ray remembers as a Chrome trace; it blocks while Ray collects them."""
    ray.timeline(str(path))
