"""Starts a run's driver, again and again where the plan ends it; sees that it neither wedges nor leaves anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from uuid import uuid4

from chaos.damage import damage
from chaos.kinds import KILL
from chaos.leftovers import MARK, kill_marked, left_by
from chaos.network import environment, lost_at_the_start, note_loss
from chaos.plan import Fault
from chaos.service import Service
from chaos.small_disk import free
from chaos.strikes import STRIKES, Strikes
from rlhf_ray.errors import CheckpointError, RunInterrupted
from rlhf_ray.failpoints import EXIT_CODE
from rlhf_ray.observability.run_directory import RunDirectory
from tests.cluster.processes import abandoned, shared_memory

WEDGE_S = 240.0
"""A run of which nothing is heard for so long is wedged: its own deadlines (`start_timeout_s`, `call_timeout_s` and
`heartbeat_timeout_s`) are shorter."""
MOST_SURPRISES = 2
"""Ends of the driver that nobody planned, after which the run is resumed all the same."""
DRIVER = "chaos.driver"
"""The module that is run."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Start:
    """One driver process, from its start to its end."""

    pid: int
    began: float
    ended: float
    """Time of day, in seconds since 1970."""
    code: int
    expected: int
    log: Path
    wedged: bool

    @property
    def abrupt(self) -> bool:
        """Whether it had no time to put anything in order."""
        return self.code < 0 or self.code == EXIT_CODE

    def last_words(self) -> str:
        """The end of what it printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-600:]


@dataclass
class ChaosRun:
    """A run among faults, as it went."""

    config: Path
    """The run's configuration; its files lie beside it."""
    directory: Path
    """Where the run writes."""
    faults: list[Fault]
    starts: list[Start] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes and shared memory that were there after an end."""
    interruption: BaseException | None = None
    """Why it is not over, if whoever started chaos asked it to stop."""
    tell: Callable[[str], None] = field(default=lambda _: None)
    """Called with every fault in a line, as it is injected."""
    told: int = 0
    """Faults told of so far."""

    def tell_news(self) -> None:
        """Tell of faults that were injected since the last time."""
        for line in self.strikes.read("struck")[self.told :]:
            self.told += 1
            who = f"{line['role']}/{line['rank']}, " if "role" in line else ""
            after = f", after update {line['step']}" if "step" in line else ""
            self.tell(f"[{self.told}/{len(self.faults)}] {line['kind']}: {who}{line['state']}{after}")

    @property
    def strikes(self) -> Strikes:
        """What was done to it."""
        return Strikes(self.config.with_suffix(".strikes.jsonl"))


def run(config: Path, directory: Path, faults: Sequence[Fault] = (), service: Service | None = None,
        tell: Callable[[str], None] | None = None) -> ChaosRun:
    """Run a configuration to its end, among faults; or until Ctrl-C or SIGTERM, which `ChaosRun.interruption` keeps.

    Args:
        directory: its `run.dir`.
        service: that gives its rewards over HTTP, if one does.
        tell: is told of every fault in a line, as it is injected.
    """
    record, mark, segments = ChaosRun(config, directory, list(faults)), uuid4().hex, shared_memory()
    record.tell = tell or record.tell
    if service is not None:
        service.serve(record.strikes)
    try:
        _start_until_the_end(record, mark)
        record.left += [f"/dev/shm/{name}" for name in abandoned(segments)]
    except (KeyboardInterrupt, SystemExit) as asked:
        record.interruption = record.interruption or asked
        kill_marked(mark)
        if not record.starts:
            raise
    return record


def _start_until_the_end(record: ChaosRun, mark: str) -> None:
    """Start drivers until one ends well, or too many end otherwise than planned."""
    pending, surprises = list(record.faults), 0
    while True:
        start = _one_driver(record, pending, mark)
        record.starts.append(start)
        if record.interruption is not None:
            return
        record.left += [f"{what} after start {len(record.starts)}" for what in left_by(mark)]
        struck = record.strikes.struck()
        free(record.directory.parent)
        pending = [fault for fault in pending if fault.number not in struck]
        surprises += start.wedged or start.code != start.expected
        if start.code == 0 or surprises > MOST_SURPRISES:
            break
        _damage(record, pending)
    record.tell_news()


def _one_driver(record: ChaosRun, pending: Sequence[Fault], mark: str) -> Start:
    """Start the driver with the faults up to the next one that ends it, and wait for its end."""
    number = len(record.starts) + 1
    until = next((place for place, fault in enumerate(pending) if fault.what.ends_the_driver), len(pending))
    mine = [fault for fault in pending[: until + 1] if fault.what.target != "checkpoint"]
    own = {MARK: mark, STRIKES: str(record.strikes.path), **environment(mine)}
    faults, log = (record.config.with_suffix(f".{number}.{kind}") for kind in ("faults.json", "log"))
    faults.write_text(json.dumps([fault.plain() for fault in mine]))
    command = [sys.executable, "-m", DRIVER, str(record.config), str(faults), str(record.strikes.path),
               *(["--resume"] if number > 1 else [])]
    began = time.time()
    with log.open("w") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, process_group=0,
                                  env={**os.environ, **own})
        try:
            wedged = _wait(driver, record, log)
        except (KeyboardInterrupt, SystemExit) as asked:
            record.interruption, wedged = asked, False
            driver.kill()
            driver.wait()
            kill_marked(mark)
    code, end = driver.returncode, next((fault for fault in mine if fault.what.ends_the_driver), None)
    expected = code if lost_at_the_start(mine, code, log.read_text(errors="replace")) else _expected(end)
    start = Start(driver.pid, began, time.time(), code, expected, log, wedged)
    note_loss(record, start, mine)
    return start


def _expected(end: Fault | None) -> int:
    if end is None:
        return 0
    if end.what.target == "failpoint":
        return EXIT_CODE
    if end.what.target == "disk":
        return CheckpointError.exit_code
    return -KILL if end.what.signal == KILL else RunInterrupted.exit_code


def _wait(driver: subprocess.Popen[bytes], record: ChaosRun, log: Path) -> bool:
    """Wait for the driver to end; one that shows no progress is killed. Returns whether that was so."""
    files = RunDirectory(record.directory)
    watched = (files.metrics, files.faults, record.strikes.path, log)
    seen, since = tuple[int, ...](), time.monotonic()
    while driver.poll() is None:
        now = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in watched)
        if now != seen:
            seen, since = now, time.monotonic()
            record.tell_news()
        if time.monotonic() - since > WEDGE_S:
            driver.kill()
            driver.wait()
            return True
        time.sleep(0.05)
    return False


def _damage(record: ChaosRun, pending: list[Fault]) -> None:
    """Damage a checkpoint, if that is what comes before anything is done to the next driver."""
    coming = takewhile(lambda fault: fault.what.follows_an_end, pending)
    fault = next((fault for fault in coming if fault.what.target == "checkpoint"), None)
    if fault is None:
        return
    pending.remove(fault)
    done = damage(fault, RunDirectory(record.directory).checkpoints)
    if done is not None:
        record.strikes.add("struck", fault=fault.number, kind=fault.kind, state=done, in_state=True)
