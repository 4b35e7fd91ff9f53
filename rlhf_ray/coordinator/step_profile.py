"""Profile of one step on request: operators of its models, and a timeline of the workers.

A step is the span of its row of metrics: from the wait for its batch to the end of its publication. The files are in
`profile/step_N/` of the run's directory. Profiling changes no result and ends no run: a worker that cannot be profiled
is left out.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_ray.errors import ConfigError, RLHFError, first_line
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import Span, chrome_trace
from rlhf_ray.records import WorkerProfile
from rlhf_ray.roles.profiling import Profiled, ProfiledByTorch
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup

MOST_RANKS = 4
"""Workers of each role that are profiled, the first ones; the others of a role behave alike."""
BEGIN_S = 60.0
"""A worker that does not begin by then is left out: the step waits for those that do."""
RAY_TRACE = "ray.trace.json"
NO_STEP = "no further step started: the run has ended, or lost a learner; repeat the request if it continues"


class StepProfiler:
    """Profiles a configured step, and the next step on each request."""

    def __init__(self, directory: RunDirectory, roles: RoleGroups, at_step: int | None = None,
                 say: Callable[[str], None] = lambda _: None,
                 write_timeline: Callable[[Path], None] | None = None) -> None:
        """
        Args:
            at_step: a step to profile without a request.
            say: shows a message to the user.
            write_timeline: writes Ray's timeline of calls to a file, if Ray records it.
        """
        self._directory = directory
        self._roles = roles
        self._at_step = at_step
        self._say = say
        self._write_timeline = write_timeline
        self._asked: list[asyncio.Future[dict[str, Any]]] = []
        self._workers: list[tuple[WorkerGroup[Profiled], int]] | None = None
        """Workers that are being profiled; None between profiles."""
        self._closed = False

    async def requested(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Profile the next step that begins; answers when it is over, with its number and the profile's directory.

        Raises:
            ConfigError: the run ends before.
        """
        if self._closed:
            raise ConfigError(NO_STEP)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await answer

    async def begin(self, step: int) -> None:
        """Start a profile with this step, if one is due."""
        if not self._asked and step != self._at_step:
            return
        roles = self._roles
        scorers = [roles.by_section[row.section] for row in roles.scorers() if issubclass(row.cls, ProfiledByTorch)]
        groups: list[WorkerGroup[Profiled]] = [*scorers, *roles.learners()]
        up = sorted(roles.dispatcher(roles.generators).scheduler.up)
        ranks: list[tuple[WorkerGroup[Profiled], int]] = [(roles.generators, rank) for rank in up[:MOST_RANKS]]
        ranks += [(group, rank) for group in groups for rank in range(min(len(group), MOST_RANKS))]
        begun = await asyncio.gather(
            *(group.call(rank, Profiled.begin_profile, deadline=Deadline(BEGIN_S)).done() for group, rank in ranks),
            return_exceptions=True)
        self._workers = [worker for worker, failed in zip(ranks, begun, strict=True) if _worked(failed)]

    async def end(self, step: int, began: float, ended: float) -> None:
        """A step is over, which lasted from `began` to `ended` by the step clock."""
        if self._workers is None:
            return
        workers, self._workers = self._workers, None
        try:
            directory = await self._kept(workers, step, began, ended)
        except Exception as error:  # a full disk, a cluster that gives no timeline
            self._say(f"step {step} could not be profiled: {first_line(error)}")
            self._refuse(f"step {step} could not be profiled: {type(error).__name__}: {error}")
            return
        self._say(f"profile of step {step} in {directory}")
        for answer in self._asked:
            if not answer.done():
                answer.set_result({"step": step, "directory": str(directory)})
        self._asked.clear()

    def close(self) -> None:
        """Refuse open requests, and stop the profilers of an unfinished step in workers that outlive the learners."""
        workers = self._workers or []
        self._workers = None
        self._closed = True
        for group, rank in workers:
            if not self._roles.trains(group.role):
                group.call(rank, Profiled.drop_profile)  # its result and its failure do not matter
        self._refuse(NO_STEP)

    def _refuse(self, why: str) -> None:
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(ConfigError(why))
        self._asked.clear()

    async def _kept(
        self, workers: list[tuple[WorkerGroup[Profiled], int]], step: int, began: float, ended: float,
    ) -> Path:
        """Write the profile of a step; returns its directory."""
        directory = self._directory.profile / f"step_{step}"
        records = self._directory.files.records
        await records.run(partial(directory.mkdir, parents=True, exist_ok=True))
        outcomes = await asyncio.gather(*(
            group.call(rank, Profiled.end_profile, trace=str(
                directory.resolve() / f"{group.role}_{rank}.trace.json.gz")).value()
            for group, rank in workers), return_exceptions=True)
        profiles = {f"{group.role}/{rank}": profile for (group, rank), profile in zip(workers, outcomes, strict=True)
                    if _worked(profile) and isinstance(profile, WorkerProfile)}
        spans = [span for span in self._roles.clock.work(began, ended) if not span.role.startswith("phase:")]
        await records.run(self._write, step, profiles, spans, (began, ended))
        if self._write_timeline is not None:
            await records.run(self._write_timeline, directory / RAY_TRACE)
        return directory

    def _write(self, step: int, profiles: Mapping[str, WorkerProfile], spans: list[Span],
               window: tuple[float, float]) -> None:
        """Write `workers.trace.json`, and `profile.json` for the report, with times since the start of the step."""
        began, ended = window
        where = f"{self._directory.profile.name}/step_{step}"
        lanes = [[f"{s.role}/{s.worker}", round(max(s.start, began) - began, 6), round(min(s.end, ended) - began, 6)]
                 for s in sorted(spans, key=lambda span: span.start)]
        self._directory.write_json(f"{where}/workers.trace.json", chrome_trace(lanes))
        self._directory.write_json(f"{where}/profile.json", {
            "step": step, "seconds": ended - began, "spans": lanes,
            "workers": {name: asdict(profile) for name, profile in profiles.items()}})


def _worked(outcome: Any) -> bool:
    """Whether a call succeeded. Refused calls and lost workers are ignored here.

    Raises:
        BaseException: an error that is not an `RLHFError`.
    """
    if isinstance(outcome, BaseException) and not isinstance(outcome, RLHFError):
        raise outcome
    return not isinstance(outcome, BaseException)
