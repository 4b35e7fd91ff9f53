"""Probes of the cluster's head, and the end of a driver whose head is lost.

Ray's client ends the process with exit code 1 when it has not reached the head for 60 s
(RAY_gcs_rpc_server_reconnect_timeout_s), as if the run had failed. So a thread probes the head, and ends the process a
little earlier with the exit code of `ClusterUnavailable`. Nothing is lost by that: a run resumes from its last
checkpoint after `kill -9` at any moment.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhf_ray.errors import ClusterError, ClusterUnavailable, RLHFError, WorkerError, first_line
from rlhf_ray.internals.ray import RECONNECT_TIMEOUT, RECONNECT_TIMEOUT_S
from rlhf_ray.observability.non_blocking_output import drain_output, use_non_blocking_output

CONNECT_S = 10.0
"""Longest wait for a connection to the cluster's address."""
EVERY_S = 5.0
"""Interval of the probes."""
REMEDY = "When the cluster is back, the same command with --resume continues the run (run.auto_resume waits for it)"


def require_listener(address: str, timeout_s: float = CONNECT_S) -> None:
    """Refuse a host:port that takes no connections: Ray itself tries for minutes, and logs each try.

    Raises:
        ClusterUnavailable: the address takes no connections now.
        ClusterError: it is not an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto", or another notation of Ray's
    try:
        if int(port) > 65535:  # the system takes ports modulo 65536
            raise OverflowError("ports go up to 65535")
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError, UnicodeError) as error:
        kind = ClusterUnavailable if isinstance(error, OSError) else ClusterError
        raise kind(f"nothing takes connections at cluster.address={address!r} ({error}): start the cluster "
                   "(`ray start --head` prints its address), or correct host and port") from error


def is_listening(address: str) -> bool:
    """Whether a host:port takes connections; True for an address of another kind, which cannot be probed."""
    try:
        require_listener(address, EVERY_S)
    except ClusterError:
        return False
    return True


def raise_for_lost_head(address: str, error: Exception) -> None:
    """Raise `ClusterUnavailable` in place of `error` if workers or Ray failed and the head does not answer.

    Raises:
        ClusterUnavailable: the head does not answer.
    """
    if (isinstance(error, WorkerError) or not isinstance(error, RLHFError)) and not is_listening(address):
        raise ClusterUnavailable(f"the head of the Ray cluster at {address} takes no connections, and the run failed: "
                                 f"{first_line(error)}. {REMEDY}") from error


def head_timeout_s() -> float:
    """How long the head may be unreachable: less than the time after which Ray's client ends the process."""
    try:
        return 0.75 * float(os.environ.get(RECONNECT_TIMEOUT, RECONNECT_TIMEOUT_S))
    except ValueError:
        return 0.75 * RECONNECT_TIMEOUT_S


@contextmanager
def head_watched(address: str, end: Callable[[str], None] | None = None, timeout_s: float | None = None,
                 every_s: float = EVERY_S) -> Iterator[None]:
    """Probe the head during the enclosed work.

    Args:
        end: called once with a message when the head is lost; ends the process when None.
        timeout_s: how long the head may be unreachable; `head_timeout_s` when None.
        every_s: interval of the probes.
    """
    over, timeout_s = threading.Event(), head_timeout_s() if timeout_s is None else timeout_s
    thread = threading.Thread(target=_watch, args=(address, end or end_process, timeout_s, every_s, over),
                              name="head watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * every_s)


def _watch(address: str, end: Callable[[str], None], timeout_s: float, every_s: float, over: threading.Event) -> None:
    """Probe until the head has been unreachable for `timeout_s` seconds and three probes: this process may have been
    stopped as well."""
    last, failed = time.monotonic(), 0
    while not over.wait(every_s):
        if is_listening(address):
            last, failed = time.monotonic(), 0
            continue
        failed += 1
        away_s = time.monotonic() - last
        if failed >= 3 and away_s >= timeout_s and not over.is_set():
            end(f"the head of the Ray cluster at {address} has not taken a connection for {away_s:.0f} s: it is lost, "
                f"or the network between here and there is. {REMEDY}")
            return


def end_process(message: str) -> None:
    """End this process, from any thread, with the exit code of `ClusterUnavailable`, even when its output is
    blocked."""
    use_non_blocking_output()
    sys.stderr.write(f"error: {message}\n")
    drain_output()
    os._exit(ClusterUnavailable.exit_code)
