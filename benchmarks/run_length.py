"""`python -m benchmarks.run_length`: what a step, a checkpoint and a resume cost early and late in a run.

Runs the coordinator's storage without models: the data cursor (one epoch, shuffled), the ledger, metrics, texts, faults
and checkpoints of a run of 100 samples a step, with the classes and in the threads that a run has, on real files. Now
and then the run is closed and resumed from its newest checkpoint, as after a death. Each figure of a line is measured
around that step.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

from benchmarks.machine import describe_machine
from benchmarks.side_process import run_in_process
from benchmarks.summary import commit
from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.checkpoint.state_files import encoded_state, load_state
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.coordinator.recovery import LEDGER, STATE
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.observability.metrics import MetricsWriter, metric_rows_from_end
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sample_files import SampleWriter
from rlhf_ray.observability.status_page import status_page
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import require_sound
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts

SAMPLES, PER_PROMPT, CHUNKS = 100, 2, 2
"""Samples of a step and of a prompt, and chunks of a step."""
EPOCH = 2_000_000
"""Prompts of the data set: ten million samples are two epochs and a half."""
EVERY = 100
"""Steps between two checkpoints."""
METRICS, TEXTS, TEXT = 70, 4, "so it goes on and on, a word at a time. " * 8
FAULTS_EVERY = 50
"""Steps between two lost workers."""
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000)
"""Steps after which figures are taken."""
AROUND = 500
"""Steps before a mark whose median is its step's time; five checkpoints lie among them."""


@dataclass(frozen=True)
class Figures:
    """A run around one of its steps. Times are CPU seconds of the process, if nothing else is said."""

    steps: int
    samples: int
    step_s: float
    checkpoint_s: float
    """From the request to the ledger's mark."""
    event_loop_s: float
    """Of these, the event loop's thread."""
    resume_s: float
    """Verify the newest checkpoint, open ledger, metrics and texts after it."""
    status_s: float
    """`rlhf-ray status`, without starting Python."""
    audit_s: float
    """`rlhf-ray ledger --check`, likewise."""
    ledger_mib: float
    """The copy in the checkpoint."""
    metrics_mib: float
    files: int
    """In the run's directory, checkpoints left out."""
    memory_mib: float
    """Resident memory of the process."""


class Run:
    """The files of a run that goes on after a step (0: begins)."""

    def __init__(self, directory: RunDirectory, after: int) -> None:
        self.directory, self.files, term = directory, directory.files, directory.term
        self.store = CheckpointStore(directory.checkpoints, keep=2, term=term)
        cursor = PromptCursor(EPOCH, seed=0, shuffle=True)
        self.state = RunState(FixedKL(0.1), cursor)
        facts = LedgerFacts(SAMPLES, PER_PROMPT, 0, (EPOCH,), 0, True, (1.0,))
        start = self.store.latest() if after else None
        resume_at = start.step if start else None
        logging = LoggingConfig(tensorboard=False, ray_metrics=False)
        self.metrics = MetricsWriter(directory.path, logging, resume_at, term)
        self.texts = SampleWriter(directory.samples, term)
        if resume_at is not None:
            self.texts.cut(resume_at)
        self._row: Any = None
        self.faults = FaultLog(directory.faults, term=term, thread=self.files.records)
        if start is None:
            self.ledger = Ledger.create(directory.ledger, facts, term, self.files.records)
        else:
            self.ledger = Ledger.resume(directory.ledger, start.path / LEDGER, facts, term, self.files.records)
            self.state.load_state_dict(load_state(start.path / STATE)["run"])
            if self.ledger.open_keys() or self.ledger.position() != cursor.position:
                raise RuntimeError("the ledger and the data cursor of a checkpoint differ")

    async def step(self) -> None:
        """What the coordinator writes in a step."""
        state, ledger = self.state, self.ledger
        chunks = []
        for _ in range(CHUNKS):
            drawn = state.cursor.next(SAMPLES // CHUNKS // PER_PROMPT)
            chunks.append([SampleKey(epoch, row, sample) for epoch, row in drawn for sample in range(PER_PROMPT)])
            ledger.admit(chunks[-1], state.cursor.position)
            ledger.start_attempt(chunks[-1], state.step)
        await ledger.settled()
        for keys in chunks:
            ledger.generated(keys, "generator/0")
            ledger.scored(keys, state.step)
        ledger.consumed([key for keys in chunks for key in keys], state.step + 1)
        await ledger.settled()
        state.step += 1
        state.samples += SAMPLES
        if state.step % FAULTS_EVERY == 0:
            self.faults.write({"role": "generator", "rank": 0, "kind": "died", "reason": TEXT, "redispatched": 1})
        if self._row is not None:
            await self.files.records.wait(self._row)
        self._row = self.files.records.submit(self._write, state.step)

    def _write(self, step: int) -> None:
        self.metrics.write(step, {f"some/metric_{n}": step / (n + 3) for n in range(METRICS)})
        row = {"step": step, "prompt": TEXT, "response": TEXT, "score": 0.5, "kl": 0.1}
        self.texts.write(step, pa.Table.from_pylist([row] * TEXTS))

    async def save(self) -> None:
        """A checkpoint, as `Recovery` writes it, without the learners' parts."""
        files, step = self.files, self.state.step
        await files.records.wait(self._row)
        tmp = await files.checkpoints.run(self.store.begin, step)
        copy = self.ledger.save(tmp / LEDGER)
        snapshot = encoded_state({"run": self.state.state_dict(())})
        await files.records.wait(copy)
        await files.checkpoints.run((tmp / STATE).write_bytes, snapshot)
        await files.checkpoints.run(self.store.commit, tmp, step)
        self.ledger.mark_committed(step)
        await self.ledger.settled()

    def close(self) -> None:
        """End it in order."""
        self.ledger.close()
        self.metrics.close()


@contextmanager
def timed(times: "deque[float] | list[float]") -> Iterator[None]:
    """Append the CPU seconds that the process takes for the block, in all its threads."""
    began = time.process_time()
    yield
    times.append(time.process_time() - began)


async def figures_of(directory: RunDirectory, marks: list[int]) -> list[Figures]:
    """Run up to the last mark, and measure around each."""
    run, found = Run(directory, 0), []
    for mark in marks:
        steps: deque[float] = deque(maxlen=AROUND)
        checkpoints: deque[float] = deque(maxlen=AROUND // EVERY)
        loop: deque[float] = deque(maxlen=AROUND // EVERY)
        while run.state.step < mark:
            with timed(steps):
                await run.step()
            if run.state.step % EVERY == 0:
                before = time.thread_time()
                with timed(checkpoints):
                    await run.save()
                loop.append(time.thread_time() - before)
        status, audit = run_in_process(readers, directory.path)
        resume = list[float]()
        run.close()
        with timed(resume):
            run = Run(directory, mark)
        if run.state.step != mark or next(metric_rows_from_end(directory.path))["step"] != mark:
            raise RuntimeError(f"the run did not go on after step {mark}")
        found.append(Figures(
            mark, run.state.samples, median(steps), median(checkpoints), median(loop), resume[0], status, audit,
            mib(run.store.path(mark) / LEDGER), sum(map(mib, directory.metrics_parts())),
            sum(len(files) for place, _, files in os.walk(directory.path) if "checkpoints" not in place),
            int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20))
        print(json.dumps(asdict(found[-1])), file=sys.stderr, flush=True)
    run.close()
    return found


def readers(run: Path) -> tuple[float, float]:
    """CPU seconds of `rlhf-ray status` and `rlhf-ray ledger --check`, which read the run in processes of their own."""
    status, audit = list[float](), list[float]()
    with timed(status):
        status_page(run)
    with timed(audit), closing(open_for_reading(RunDirectory(run).ledger)) as db:
        require_sound(db, ended=False)
    return status[0], audit[0]


def mib(path: Path) -> float:
    """Size of a file."""
    return path.stat().st_size / 2**20


def markdown(found: list[Figures]) -> str:
    """A table, a line for each mark."""
    lines = ["| steps | samples | step, ms | checkpoint, ms | of it the event loop, ms | resume, s | status, s | "
             "audit, s | ledger, MiB | metrics, MiB | files | memory, MiB |", "|" + "---:|" * 12]
    lines += [f"| {f.steps:,} | {f.samples:,} | {f.step_s * 1e3:.1f} | {f.checkpoint_s * 1e3:.0f} | "
              f"{f.event_loop_s * 1e3:.1f} | {f.resume_s:.2f} | {f.status_s:.2f} | {f.audit_s:.2f} | "
              f"{f.ledger_mib:.1f} | {f.metrics_mib:.0f} | {f.files} | {f.memory_mib:.0f} |" for f in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print a table, and keep it with machine and commit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_length", description=__doc__)
    parser.add_argument("--steps", type=int, default=MARKS[-1], help=f"of the run (default: {MARKS[-1]:,})")
    parser.add_argument("--dir", type=Path, help="directory of the temporary files (default: the system's)")
    asked = parser.parse_args()
    marks = sorted({*(mark for mark in MARKS if mark < asked.steps), asked.steps})
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-length-", dir=asked.dir) as place:
        directory = RunDirectory.create(Path(place, "run"))
        with directory.owned():
            found = asyncio.run(figures_of(directory, marks))
            directory.files.close()
    print(markdown(found))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "run_length.json").write_text(json.dumps(
        {"commit": commit(), "machine": describe_machine(), "figures": list(map(asdict, found))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
