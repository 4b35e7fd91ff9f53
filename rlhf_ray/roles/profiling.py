"""Profiles of workers: torch's profiler or vLLM's own, a Chrome trace, and a short table of operators."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_ray.records import OperatorTime, WorkerProfile

if TYPE_CHECKING:
    from vllm.config import ProfilerConfig

OPERATORS = 15
"""Number of operators in the table, those with the most self time."""
PROFILED_STEPS = 200
"""Maximum number of model steps in one profile; viewers cannot open traces with thousands."""


class Profiled(Protocol):
    """A role whose workers can be profiled; one profile at a time."""

    def start(self, *args: Any) -> Any:
        """See the role."""

    def begin_profile(self) -> Any:
        """Start profiling; an unfinished profile is discarded."""

    def end_profile(self, trace: str) -> Any:
        """Stop profiling and write the trace; returns a `WorkerProfile`, or None if none was started."""

    def drop_profile(self) -> Any:
        """Stop profiling and discard the profile."""


class TorchProfile:
    """Profiles the thread that calls `begin` and `end`, and GPUs if there are any; one profile at a time."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._began = 0.0

    def begin(self) -> None:
        """Start profiling; an unfinished profile is discarded."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.drop()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        # acc_events: without it torch warns that it keeps only the last cycle's events; here there is one cycle.
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._began = time.perf_counter()

    def end(self, trace: Path | str) -> WorkerProfile | None:
        """Stop profiling, write the Chrome trace and return its summary; None if none was started (in a worker that was
        replaced meanwhile)."""
        if self._profiler is None:
            return None
        seconds = time.perf_counter() - self._began
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(trace))
        return WorkerProfile(Path(trace).name, seconds, busiest(profiler.key_averages()))

    def drop(self) -> None:
        """Stop profiling and discard the profile."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


class ProfiledByTorch:
    """A role that torch profiles while it serves its calls (`Profiled`)."""

    @cached_property
    def _profile(self) -> TorchProfile:
        return TorchProfile()

    def begin_profile(self) -> None:
        """See `TorchProfile.begin`."""
        self._profile.begin()

    def end_profile(self, trace: str) -> WorkerProfile | None:
        """See `TorchProfile.end`."""
        return self._profile.end(trace)

    def drop_profile(self) -> None:
        """See `TorchProfile.drop`."""
        self._profile.drop()


def busiest(averages: Any, count: int = OPERATORS) -> list[OperatorTime]:
    """The operators with the most self time, from torch's sums over all calls of each; on GPUs, of GPU time."""
    on_gpu = sum(event.self_device_time_total for event in averages) > 0
    shown = [OperatorTime(event.key, event.count, _own(event, on_gpu) / 1e3) for event in averages]
    return sorted((o for o in shown if o.own_ms > 0), key=lambda operator: -operator.own_ms)[:count]


def _own(event: Any, on_gpu: bool) -> float:
    """Self time in microseconds."""
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)


def profiler_config(directory: str) -> ProfilerConfig:
    """Enables vLLM's profiler, which costs nothing until a profile is started."""
    from vllm.config import ProfilerConfig

    return ProfilerConfig(profiler="torch", torch_profiler_dir=directory, torch_profiler_with_stack=False,
                          torch_profiler_dump_cuda_time_total=False, ignore_frontend=True,
                          max_iterations=PROFILED_STEPS)


def collect_vllm_trace(directory: Path, trace: Path) -> WorkerProfile | None:
    """Move the trace that vLLM has just written to `trace` and return its summary; None if there is none."""
    traces = sorted(directory.glob("*.pt.trace.json.gz"))
    if not traces:
        return None
    shutil.move(traces[0], trace)
    for other in traces[1:]:
        other.unlink()
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    ends = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("ph") == "X"]
    seconds = (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e6 if ends else 0.0
    return WorkerProfile(trace.name, seconds, busiest_in_trace(events))


def busiest_in_trace(events: list[dict[str, Any]], count: int = OPERATORS) -> list[OperatorTime]:
    """The operators of a Chrome trace with the most self time: GPU kernels if there are any, else CPU operators."""
    for category in ("kernel", "cpu_op"):
        own: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for name, microseconds in _own_times([e for e in events if e.get("ph") == "X" and e.get("cat") == category]):
            own[name][0] += 1
            own[name][1] += microseconds / 1e3
        if own:
            operators = [OperatorTime(name, int(calls), ms) for name, (calls, ms) in own.items()]
            return sorted(operators, key=lambda operator: -operator.own_ms)[:count]
    return []


def _own_times(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Name and self time in microseconds of each event; events of one thread are nested."""
    own: list[tuple[str, float]] = []
    within: list[tuple[Any, float, int]] = []
    for event in sorted(events, key=lambda e: (str(e["pid"]), str(e["tid"]), e["ts"], -e["dur"])):
        thread, end = (event["pid"], event["tid"]), event["ts"] + event["dur"]
        while within and (within[-1][0] != thread or within[-1][1] <= event["ts"]):
            within.pop()
        if within:
            name, time = own[within[-1][2]]
            own[within[-1][2]] = name, time - event["dur"]
        within.append((thread, end, len(own)))
        own.append((event["name"], event["dur"]))
    return own
