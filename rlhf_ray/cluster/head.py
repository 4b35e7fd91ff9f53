"""Whether a cluster's head takes connections, and the end of a driver whose head is lost.

Ray's client ends the process with exit code 1 when it has not reached the head for 60 s
(RAY_gcs_rpc_server_reconnect_timeout_s), as if the run were broken. So a thread probes the head, and ends the process
a little earlier with the exit code of `ClusterUnavailable`. Ending at once loses nothing: a run resumes from its last
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
from rlhf_ray.observability.non_blocking_output import drain_output, use_non_blocking_output

CONNECT_S = 10.0
"""For a cluster's address to take a connection."""
EVERY_S = 5.0
"""Between two probes."""
REMEDY = "When the cluster is back, the same command with --resume continues the run (run.auto_resume waits for it)"
RAY_GIVES_UP = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_GIVES_UP_S = 60.0
"""What Ray takes where that variable is not set."""


def require_listener(address: str, timeout_s: float = CONNECT_S) -> None:
    """Refuse a host:port where nobody listens: Ray itself tries for minutes, and logs each try.

    Raises:
        ClusterUnavailable: nobody does now.
        ClusterError: it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto", or another of Ray's own notations
    try:
        if int(port) > 65535:  # which the system takes modulo 65536
            raise OverflowError("ports go up to 65535")
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError, UnicodeError) as error:
        kind = ClusterUnavailable if isinstance(error, OSError) else ClusterError
        raise kind(f"nothing takes connections at cluster.address={address!r} ({error}): start the cluster "
                   "(`ray start --head` prints its address), or correct host and port") from error


def answers(address: str) -> bool:
    """Whether somebody listens at a host:port; True for an address of another kind, of which nothing is known."""
    try:
        require_listener(address, EVERY_S)
    except ClusterError:
        return False
    return True


def raise_for_lost_head(address: str, error: Exception) -> None:
    """Raise `ClusterUnavailable` in place of `error` if workers or Ray failed and the head does not answer.

    Raises:
        ClusterUnavailable: it is so.
    """
    if (isinstance(error, WorkerError) or not isinstance(error, RLHFError)) and not answers(address):
        raise ClusterUnavailable(f"the head of the Ray cluster at {address} takes no connections, and the run failed: "
                                 f"{first_line(error)}. {REMEDY}") from error


def patience_s() -> float:
    """How long a head may be away: less than until Ray's client ends the process."""
    try:
        return 0.75 * float(os.environ.get(RAY_GIVES_UP, RAY_GIVES_UP_S))
    except ValueError:
        return 0.75 * RAY_GIVES_UP_S


@contextmanager
def head_watched(address: str, end: Callable[[str], None] | None = None, patience: float | None = None,
                 every_s: float = EVERY_S) -> Iterator[None]:
    """Probe the head meanwhile.

    Args:
        end: told once when the head is lost; ends the process when None.
        patience: in seconds, `patience_s` when None.
        every_s: between two probes.
    """
    over, patience = threading.Event(), patience_s() if patience is None else patience
    thread = threading.Thread(target=_watch, args=(address, end or end_process, patience, every_s, over),
                              name="head watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * every_s)


def _watch(address: str, end: Callable[[str], None], patience: float, every_s: float, over: threading.Event) -> None:
    """Probe until the head has been away for `patience` seconds, by three probes at least: this process, too, may have
    stood still."""
    last, failed = time.monotonic(), 0
    while not over.wait(every_s):
        if answers(address):
            last, failed = time.monotonic(), 0
            continue
        failed += 1
        away_s = time.monotonic() - last
        if failed >= 3 and away_s >= patience and not over.is_set():
            end(f"the head of the Ray cluster at {address} has not taken a connection for {away_s:.0f} s: it is lost, "
                f"or cut off from here. {REMEDY}")
            return


def end_process(message: str) -> None:
    """End this process, from any thread, with the exit code of `ClusterUnavailable`, whether or not anybody takes the
    message."""
    use_non_blocking_output()
    sys.stderr.write(f"error: {message}\n")
    drain_output()
    os._exit(ClusterUnavailable.exit_code)
