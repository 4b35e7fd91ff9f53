"""Internals of accelerate: its trackers log in a process that is not one of a distributed group."""

from __future__ import annotations

from typing import Any

from accelerate import tracking
from accelerate.logging import MultiProcessAdapter

VERSION = "1.15.0"


class _Messages(MultiProcessAdapter):
    """Logs in this process, whatever its rank."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            self.logger.log(level, msg, *args, **kwargs)


def new_tracker(name: str, /, *arguments: Any, **options: Any) -> Any:
    """A tracker of accelerate's that needs no `PartialState`, not started yet.

    Source: 1.15.0, tracking.py (`logger`, `on_main_process`), logging.py (`MultiProcessAdapter.log`), state.py
    (`PartialState.__init__`).
    Missing: `main_process_only` keeps the trackers' methods from creating a `PartialState`, but each also logs by an
    adapter that raises without one. Creating one sets environment variables and calls `init_process_group` where
    LOCAL_RANK or WORLD_SIZE are set, as by a scheduler.
    Otherwise: no tracker starts.
    """
    if not isinstance(tracking.logger, _Messages):
        tracking.logger = _Messages(tracking.logger.logger, {})
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](*arguments, **options)
    tracker.main_process_only = False
    return tracker
