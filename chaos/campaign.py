"""The runs of a campaign: which faults each gets, its configuration, and its comparison with a run without faults."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from chaos import reward_function
from chaos.contradictions import contradictions, testimony_of
from chaos.episode_runs import EpisodeFiles, agent_sections, brief_sections, episode_sections, make_episode_files
from chaos.invariants import Books, violations
from chaos.kinds import KINDS
from chaos.kinds.disturbances import upload_directory
from chaos.mounts import own_disk, small_disk
from chaos.nodes import (
    HEARTBEAT_TIMEOUT_S,
    generator_node_sections,
    learner_node_sections,
    runner_node_sections,
)
from chaos.outcomes import outcomes
from chaos.plan import USUAL_MINUTES, plan, steps_for
from chaos.reward_service import RewardService, reward_service
from chaos.run_record import RunRecord
from chaos.summary import FinishedRun
from chaos.supervisor import run
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.observability.run_directory import RunDirectory
from tests.cluster.tiny import Files, make_files, ppo_settings

FAULTS_OF_ONLY = 1
"""Faults of each kind of --only."""
@dataclass(frozen=True)
class RunSettings:
    """What distinguishes one of the runs of a round."""

    max_staleness: int = 0
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sections that differ from those of the other runs."""
    uploads: bool = False
    """Whether it is copied to `run.upload`. Others are not: a copy replaces a damaged checkpoint."""
    episodes: Callable[[EpisodeFiles], Mapping[str, Any]] | None = None
    """Sections of a run whose samples are episodes, which its run without faults has, too. None: they are single
    responses."""

    @property
    def saved_every(self) -> int:
        """Steps between checkpoints."""
        return SAVED_EVERY if self.episodes is None else EPISODES_SAVED_EVERY


SAVED_EVERY, EPISODES_SAVED_EVERY = 3, 1
"""Steps between checkpoints."""
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "cluster": {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "max_restarts": 5, "max_learner_restarts": 5,
                "disk_timeout_s": 20.0},
    "logging": {"tensorboard": False, "samples": 1},
    "checkpoint": {"every": SAVED_EVERY, "every_minutes": 0, "keep": 2},
    "evaluation": {"limit": 6, "every": 4},  # a chunk and a half: both generators take part
    "reward": {"on_failure": "quarantine", "quarantine_limit": 0.2},
}
"""Sections that differ from the runs of the tests."""
SERVICE = {"type": "http", "weight": 0.01, "send": "tokens", "request_timeout_s": 2.0, "timeout_s": 60.0}
"""A small part of the reward: the service scores by prompt alone. Its slow behaviour exceeds `request_timeout_s`."""
FUNCTION = {"type": "function", "function": f"{reward_function.__file__}:score", "weight": 0.01, "timeout_s": 10.0}
"""Another small part: a user's function."""
RANKS = {"generator": 2, "policy_learner": 2, "critic_learner": 2, "episode_runner": 2}
"""Number of workers of each role that has several."""
RUNS = {
    "generator_nodes": RunSettings(sections=generator_node_sections(RANKS["generator"])),
    "learner_node": RunSettings(sections=learner_node_sections()),
    "scarce_nodes": RunSettings(sections={
        **generator_node_sections(RANKS["generator"], "scarce"),
        "cluster": {"allow_open": True, "start_timeout_s": 60, "max_restarts": 1}}),
    "runner_nodes": RunSettings(sections=runner_node_sections(RANKS["episode_runner"]), episodes=episode_sections),
    "episodes_overlapped": RunSettings(max_staleness=1, episodes=brief_sections),
    "episodes": RunSettings(episodes=episode_sections),
    "agents": RunSettings(episodes=agent_sections),
    "async_engine": RunSettings(sections={"generator": {"engine": "async"}}),
    "uploaded": RunSettings(uploads=True),
    "overlapped": RunSettings(max_staleness=1),
    "synchronous": RunSettings(),
}
"""The runs of a round, short ones first: on a node for each generator, with the learners on a node of their own,
without a spare node, with a node for each episode runner, with episodes at `max_staleness` 1 and 0, with episodes of
agents, with vLLM's engine in processes of its own, copied to `run.upload`, at `max_staleness` 1 (checked by its ledger,
not bit for bit), and one with the faults of most kinds. A kind says in which of them it is, and how often
(`Kind.runs`)."""


@dataclass(frozen=True)
class Trial:
    """The plan of one run."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of its faults; they may repeat."""
    max_staleness: int
    seed: int
    run: str = "synchronous"
    """Which of RUNS it is."""

    @property
    def reproducible(self) -> bool:
        """Whether the results must equal those of the run without faults."""
        return self.max_staleness == 0 and not any(KINDS[kind].changes_results for kind in self.kinds)

    @property
    def steps(self) -> int:
        """Number of updates."""
        return steps_for(self.kinds, RUNS[self.run].saved_every)


def trials(seed: int, minutes: float, only: Sequence[str] = (), not_tried: Container[str] = ()) -> list[Trial]:
    """The runs of one round. In less than USUAL_MINUTES there are fewer faults of each kind, and then fewer kinds.

    Args:
        not_tried: kinds that are not possible on this machine.
    """
    kinds = [kind for kind in KINDS.values() if kind.name not in not_tried and (not only or kind.name in only)]
    found = []
    for index, (name, settings) in enumerate(reversed(RUNS.items())):
        if only:
            chosen = _select({kind.name: FAULTS_OF_ONLY for kind in kinds if next(iter(kind.runs)) == name}, 1.0)
        else:
            chosen = _select({kind.name: kind.runs[name] for kind in kinds if name in kind.runs},
                             min(1.0, minutes / USUAL_MINUTES))
        if chosen:
            found.append(Trial(f"only_{name}" if only else name, chosen, settings.max_staleness, seed + index, name))
    return found[::-1]


def _select(wanted: dict[str, int], share: float) -> tuple[str, ...]:
    """The kinds in turns, each as often as wanted, cut to a share of their number."""
    left, order = Counter(wanted), list[str]()
    while left := +left:
        order += left
        left -= Counter(dict.fromkeys(left, 1))
    return tuple(order[: max(1, round(share * len(order)))])


@dataclass(frozen=True)
class Workspace:
    """A directory with the models and prompts of the runs: tiny models, in float32."""

    root: Path
    files: Files
    episode_files: EpisodeFiles
    service: RewardService
    """Gives part of the rewards."""

    @classmethod
    def make(cls, root: Path, service: RewardService) -> Workspace:
        """Write models and prompts, in a few seconds."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        root.mkdir(parents=True, exist_ok=True)
        return cls(root, make_files(root), make_episode_files(root), service)

    def configure(self, name: str, steps: int, max_staleness: int,
                  different: Mapping[str, Mapping[str, Any]] | None = None,
                  uploads: bool = False, episodes: Callable[[EpisodeFiles], Mapping[str, Any]] | None = None,
                  ) -> tuple[Path, Path]:
        """Write the configuration of a run; returns it and the directory that the run will write.

        Args:
            different: sections that differ from those of the run without faults.
            uploads: whether the run is copied to `run.upload`.
            episodes: sections of a run whose samples are episodes.
        """
        directory = self.root / name
        settings = ppo_settings(self.files, directory)
        for sections in (SECTIONS, episodes(self.episode_files) if episodes else {}, different or {}):
            for section, fields in sections.items():
                settings[section] = {**settings.get(section, {}), **(fields or {})}
                if fields is None:
                    del settings[section]
        settings["run"] |= {"steps": steps, "upload": str(upload_directory(directory)) if uploads else None}
        settings["rewards"]["service"] = {**SERVICE, "urls": [self.service.url]}
        settings["rewards"]["function"] = FUNCTION
        settings["coordinator"]["max_staleness"] = max_staleness
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path, directory


def rounds(seed: int, minutes: float, only: Sequence[str], directory: Path,
           not_tried: Container[str] = ()) -> Iterator[FinishedRun]:
    """Make the runs of one round, and of further rounds while the time allows.

    Args:
        not_tried: kinds that are not possible on this machine.

    Raises:
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM; the interrupted run has been yielded before.
    """
    began, longest, number = time.monotonic(), 0.0, 0
    undisturbed: dict[tuple[Any, ...], Path] = {}
    with small_disk(directory), reward_service() as service, ExitStack() as mounted:
        workspace = Workspace.make(directory, service)
        while not number or time.monotonic() - began + longest < 60 * minutes:
            start = time.monotonic()
            for trial in trials(seed + 100 * number, minutes, only, not_tried):
                shape = trial.steps, trial.max_staleness, RUNS[trial.run].episodes
                if shape not in undisturbed:
                    undisturbed[shape] = _run_undisturbed(workspace, trial)
                finished = _run_trial(workspace, trial, undisturbed[shape], number + 1, mounted)
                yield finished
                if finished.record.interruption is not None:
                    raise finished.record.interruption
            longest, number = max(longest, time.monotonic() - start), number + 1


def _run_undisturbed(workspace: Workspace, trial: Trial) -> Path:
    _log(f"{trial.steps} updates at max_staleness {trial.max_staleness} without faults")
    config, directory = workspace.configure(f"{trial.name}_undisturbed", trial.steps, trial.max_staleness,
                                            episodes=RUNS[trial.run].episodes)
    record = run(config, directory, (), workspace.service)
    if record.interruption is not None:
        raise record.interruption
    if record.starts[-1].code:
        raise RuntimeError(f"the run without faults ended with exit code {record.starts[-1].code}: "
                           f"{record.starts[-1].last_words()}")
    if problems := list(contradictions(record, Books.of(record), testimony_of(record))):
        raise RuntimeError(f"the run without faults is not sound: {'; '.join(problems)}")
    return directory


def _run_trial(workspace: Workspace, trial: Trial, undisturbed: Path, number: int, mounted: ExitStack) -> FinishedRun:
    """`mounted` gets the run's own disk, if it has one."""
    settings = RUNS[trial.run]
    faults = plan(trial.seed, trial.kinds, trial.steps, RANKS, settings.saved_every)
    _log(f"{trial.name}, round {number}: {trial.steps} updates with {len(faults)} faults of "
         f"{len({fault.kind for fault in faults})} kinds (seed {trial.seed})")
    config, directory = workspace.configure(f"{trial.name}_{number}", trial.steps, trial.max_staleness,
                                            settings.sections, settings.uploads, settings.episodes)
    if any(KINDS[kind].own_disk for kind in trial.kinds):
        mounted.enter_context(own_disk(directory))
    return evaluate(run(config, directory, faults, workspace.service, _log), undisturbed, trial.reproducible)


def evaluate(record: RunRecord, undisturbed: Path, reproducible: bool) -> FinishedRun:
    """Evaluate a run that is over.

    Args:
        undisturbed: directory of the same run without faults.
        reproducible: whether the results must equal those of the undisturbed run, bit for bit.
    """
    loops, end = record.injections.read("loop"), record.starts[-1].ended
    summary = json.loads(RunDirectory(undisturbed).summary.read_text())
    rows = list(read_metrics(record.directory))
    pauses = (row.get("checkpoint/pause_seconds") for row in rows)
    books, testimony = Books.of(record), testimony_of(record)
    broken = [*violations(record, undisturbed if reproducible else None), *contradictions(record, books, testimony)]
    return FinishedRun(
        record, outcomes(record), broken,
        undisturbed_s=summary["seconds_loop"] * max((row["step"] for row in rows), default=0) / summary["steps"],
        books=books, testimony=testimony, loop_s=end - (loops[0]["time"] if loops else record.starts[0].began),
        pauses_s=[seconds for seconds in pauses if seconds is not None])


def _log(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)
