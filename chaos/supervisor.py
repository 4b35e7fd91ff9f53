"""Starts a run's driver, and resumes it where the plan ends it; detects hangs and leftover processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from uuid import uuid4

import psutil

from chaos.faults import Fault
from chaos.injection_log import INJECTION_LOG
from chaos.kinds import kind_of
from chaos.outcomes import to_inject_again
from chaos.reward_service import RewardService
from chaos.run_record import RunRecord, Start
from chaos.witness.journals import JOURNALS
from rlhf_ray.observability.run_directory import RunDirectory
from tests.cluster.processes import abandoned, shared_memory

WEDGE_S = 240.0
"""A run that writes nothing for this long is wedged: its own deadlines (`start_timeout_s`, `call_timeout_s` and
`heartbeat_timeout_s`) are shorter."""
MOST_SURPRISES = 2
"""Unplanned ends of the driver after which the run is still resumed."""
DRIVER = "chaos.driver"
"""The module that is run."""
ROOT = Path(__file__).parents[1]
RUN_MARK = "RLHF_RAY_CHAOS_RUN"
"""Environment variable of all processes of a run: an id of the run."""
GONE_S = 100.0
"""Within this time after the end of a driver its processes must be gone. Ray's agents need up to 70 s after a kill -9:
they report the end of their raylet to the control store, and try for `gcs_rpc_server_reconnect_timeout_s` (60 s)."""
LEFTOVER_POLL_S = 0.2


def run(config: Path, directory: Path, faults: Sequence[Fault] = (), service: RewardService | None = None,
        on_injection: Callable[[str], None] | None = None, sources: Path = ROOT) -> RunRecord:
    """Run a configuration to its end, with faults; or until Ctrl-C or SIGTERM, which `RunRecord.interruption` stores.

    Args:
        directory: its `run.dir`.
        service: gives rewards over HTTP, if the configuration has such a reward.
        on_injection: called with one line for each fault when it is injected.
        sources: directory of the packages that the driver and its workers import.
    """
    record, mark, segments = RunRecord(config, directory, list(faults)), uuid4().hex, shared_memory()
    record.on_injection = on_injection or record.on_injection
    if service is not None:
        service.serve(record.injections, record.journals)
    try:
        _start_until_the_end(record, mark, sources)
        record.left += [f"/dev/shm/{name}" for name in abandoned(segments)]
    except (KeyboardInterrupt, SystemExit) as interruption:
        record.interruption = record.interruption or interruption
        _kill_marked(mark)
        if not record.starts:
            raise
    return record


def _start_until_the_end(record: RunRecord, mark: str, sources: Path) -> None:
    """Start drivers until one ends with exit code 0, or too many end otherwise than planned."""
    pending, surprises = list(record.faults), 0
    while True:
        start = _run_driver(record, pending, mark, sources)
        record.starts.append(start)
        if record.interruption is not None:
            return
        record.left += [f"{process} after start {len(record.starts)}" for process in _kill_leftovers(mark)]
        injected = record.injections.injected() - to_inject_again(record)
        pending = [fault for fault in record.faults if fault.number not in injected]
        surprises += start.wedged or start.code != start.expected
        if start.code == 0 or surprises > MOST_SURPRISES:
            break
        _inject_between(record, pending)
    record.report_injections()


def _run_driver(record: RunRecord, pending: Sequence[Fault], mark: str, sources: Path) -> Start:
    """Start the driver with the faults up to the next one that ends it, and wait for its end."""
    number = len(record.starts) + 1
    mine = _of_next_driver(pending)
    variables = {RUN_MARK: mark, INJECTION_LOG: str(record.injections.path),
                 JOURNALS: str(record.journals.absolute()), "PYTHONPATH": os.pathsep.join(
                     [str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])}
    for fault in mine:
        variables |= kind_of(fault).environment(fault)
        kind_of(fault).driver_starts(record, fault)
    faults, log = (record.config.with_suffix(f".{number}.{kind}") for kind in ("faults.json", "log"))
    faults.write_text(json.dumps([fault.as_dict() for fault in mine]))
    command = [sys.executable, "-m", DRIVER, str(record.config), str(faults), str(record.injections.path),
               *(["--resume"] if number > 1 else [])]
    began = time.time()
    with log.open("w") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=out, cwd=sources, process_group=0,
                                  env={**os.environ, **variables}, preexec_fn=_heed_hangups)
        try:
            wedged = _wait(driver, record, log)
        except (KeyboardInterrupt, SystemExit) as interruption:
            record.interruption, wedged = interruption, False
            driver.kill()
            driver.wait()
            _kill_marked(mark)
    code, text = driver.returncode, log.read_text(errors="replace")
    codes = (kind_of(fault).expected_code(fault, code, text) for fault in mine)
    caused = [each for each in codes if each is not None] or [0]
    start = Start(driver.pid, began, time.time(), code, code if code in caused else caused[-1], log, wedged)
    for fault in mine:
        kind_of(fault).driver_ended(record, start, fault)
    return start


def _heed_hangups() -> None:
    """Undo what `nohup` does to its children: a driver that ignores SIGHUP would not be ended by it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _of_next_driver(pending: Sequence[Fault]) -> list[Fault]:
    """The faults up to the next one that ends the driver, which it may know when it starts or injects itself."""
    until = next((index for index, fault in enumerate(pending) if kind_of(fault).ends_the_driver), len(pending))
    mine = [fault for fault in pending[: until + 1] if not kind_of(fault).needs_no_driver]
    later = [fault for fault in mine if kind_of(fault).follows_an_end][1:]  # one environment has one of them at most
    return [fault for fault in mine if fault not in later]


def _wait(driver: subprocess.Popen[bytes], record: RunRecord, log: Path) -> bool:
    """Wait for the driver to end, and kill it when it makes no progress. Returns whether it was killed."""
    files = RunDirectory(record.directory)
    seen, since = tuple[int, ...](), time.monotonic()
    while driver.poll() is None:
        watched = (*files.metrics_parts(), files.faults, record.injections.path, log)
        now = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in watched)
        if now != seen:
            seen, since = now, time.monotonic()
            record.report_injections()
        if time.monotonic() - since > WEDGE_S:
            driver.kill()
            driver.wait()
            return True
        time.sleep(0.05)
    return False


def _inject_between(record: RunRecord, pending: list[Fault]) -> None:
    """Inject the fault that is due before the next driver starts, if there is one."""
    coming = takewhile(lambda fault: kind_of(fault).follows_an_end, pending)
    fault = next((fault for fault in coming if kind_of(fault).needs_no_driver), None)
    if fault is None:
        return
    pending.remove(fault)
    done = kind_of(fault).inject_between(record, fault)
    if done is not None:
        record.injections.add("injected", fault=fault.number, kind=fault.kind, state=done, in_state=True)


def _kill_leftovers(mark: str) -> list[str]:
    """Kill the processes of a run that are still there GONE_S after the end of its driver, so that they do not affect
    the next start; returns their command lines."""
    until, empty = time.monotonic() + GONE_S, 0
    while empty < 2 and time.monotonic() < until:  # a process that has only just been started shows no environment yet
        empty = 0 if any(_marked(mark)) else empty + 1
        time.sleep(LEFTOVER_POLL_S)
    left = []
    for process in _marked(mark):
        with suppress(psutil.NoSuchProcess):
            left.append(f"process {process.pid} ({' '.join(process.cmdline())[:80]})")
            process.kill()
    return left


def _kill_marked(mark: str) -> None:
    for process in _marked(mark):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _marked(mark: str) -> Iterator[psutil.Process]:
    """The processes of a run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(RUN_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
