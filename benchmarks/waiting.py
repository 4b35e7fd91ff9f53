"""What a person sees while a benchmark runs: which one, for how long, and how much is left by earlier runs' times."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressBar, SpinnerColumn, Task, TextColumn, TimeElapsedColumn

from rlhf_ray.observability.progress import duration, is_terminal


class ElapsedBar(BarColumn):
    """A bar that fills with time: `total` seconds are what the task usually takes."""

    def render(self, task: Task) -> ProgressBar:
        """Full a little early rather than late; pulsing where the usual time is not known."""
        return ProgressBar(total=task.total, completed=min(task.elapsed or 0.0, task.total or 0.0), width=30,
                           pulse=task.total is None, animation_time=task.get_time())


@contextmanager
def working(
    name: str, plan: Sequence[str], usual: Mapping[str, float], stream: TextIO | None = None
) -> Iterator[None]:
    """Around the work of the benchmark `name`, one of `plan`, whose usual seconds are `usual` as far as known.

    Args:
        stream: where to write; standard error when empty.
    """
    stream = stream or sys.stderr
    place, left = plan.index(name), time_left(plan[plan.index(name):], usual)
    head = f"[{place + 1}/{len(plan)}] {name}"
    if not is_terminal(stream):
        print(f"{head}, {left}", file=stream, flush=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn(head, markup=False), ElapsedBar(), TimeElapsedColumn(), TextColumn(left))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        progress.add_task(name, total=usual.get(name))
        yield


def time_left(names: Sequence[str], usual: Mapping[str, float]) -> str:
    """"about 12 min left", with how many benchmarks nobody has timed yet."""
    known = [usual[name] for name in names if name in usual]
    untimed = len(names) - len(known)
    said = [f"about {duration(sum(known))} left"] if known else []
    return " + ".join([*said, *([f"{untimed} not timed before"] if untimed else [])])
