"""What a worker computes while somebody looks: torch's profiler around a stretch of time, a trace and a short table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rlhf_ray.records import OperatorTime, WorkerProfile

OPERATORS = 15
"""Operators that the table names, those with most time of their own."""


class TorchProfile:
    """One profile at a time, of the thread that calls `begin` and `end`. GPUs are looked at where there are some."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._began = 0.0

    def begin(self) -> None:
        """Look from now on; what an earlier look saw and nobody asked for is dropped."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.drop()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        # acc_events: without it torch warns, and keeps the events of the last cycle only, of which there is one.
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._began = time.perf_counter()

    def end(self, trace: Path) -> WorkerProfile | None:
        """Stop looking, write the Chrome trace, and sum it up; None where nobody looked (a worker that was replaced
        meanwhile)."""
        if self._profiler is None:
            return None
        seconds = time.perf_counter() - self._began
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(trace))
        return WorkerProfile(trace.name, seconds, busiest(profiler.key_averages()))

    def drop(self) -> None:
        """Stop looking, and forget."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def busiest(averages: Any, count: int = OPERATORS) -> list[OperatorTime]:
    """The operators that took most time of their own, of torch's sums over all calls of each; on GPUs, of the GPU's
    time."""
    on_gpu = sum(event.self_device_time_total for event in averages) > 0
    shown = [OperatorTime(event.key, event.count, _own(event, on_gpu) / 1e3) for event in averages]
    return sorted((o for o in shown if o.own_ms > 0), key=lambda operator: -operator.own_ms)[:count]


def _own(event: Any, on_gpu: bool) -> float:
    """Microseconds."""
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
