"""A sign of life that a busy process gives: a thread that counts, where the driver can see it (`cluster.pulse`)."""

import threading
import time
from contextlib import suppress
from typing import Any

from ray.experimental.internal_kv import _internal_kv_put

BEAT_S = 1.0
"""Seconds between two counts."""


def begin_beating(_: Any, key: str) -> None:
    """Count under `key`, at Ray's control service, for as long as this process lives."""
    threading.Thread(target=_beat, args=(key.encode(),), daemon=True, name="beat").start()


def _beat(key: bytes) -> None:
    beats = 0
    while True:
        beats += 1
        with suppress(Exception):  # the control service may be restarting; who is silent for long is given up
            _internal_kv_put(key, str(beats).encode())
        time.sleep(BEAT_S)
