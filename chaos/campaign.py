"""Which runs a call makes, and with which faults; and the runs themselves, each beside the same run without a fault."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.invariants import Books, broken
from chaos.kinds import KINDS, REFUSED, TOO_LARGE, of_target
from chaos.nodes import SPARE
from chaos.outcome import outcomes
from chaos.plan import fewest_steps, plan
from chaos.service import reward_service
from chaos.settings import RANKS, SAVED_EVERY, Ground
from chaos.small_disk import small_disk
from chaos.summary import Finished
from chaos.supervisor import ChaosRun, run
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.observability.run_directory import RunDirectory

USUAL_MINUTES = 15.0
STEPS_A_FAULT, FEWEST_STEPS = 1.5, 12
ALONE = 2
"""Faults of a kind that is asked for alone."""
SYNCHRONOUS = {
    "generator_kill": 2, "generator_stop": 1, "generator_kill_in_publication": 1, "reward_kill": 1, "reward_stop": 1,
    "reference_kill": 1, "reference_stop": 1, "assembler_kill": 1, "policy_kill": 1, "policy_stop": 1,
    "policy_kill_in_forward": 1, "critic_kill": 1, "critic_stop": 1, "driver_kill": 1, "driver_term": 1,
    **{kind.name: 1 for kind in of_target("service", "failpoint", "disk", "network", "checkpoint")
       if not kind.changes_results},
}
"""Faults of the run at max_staleness 0, by kind."""
OVERLAPPED = {"generator_kill": 2, "generator_stop": 1, "generator_kill_in_publication": 1, "reward_kill": 1,
              "reference_kill": 1, "assembler_kill": 1, "policy_kill": 1, "critic_stop": 1, "driver_kill": 1,
              "exit_at_checkpoint_copied": 1, "checkpoint_flip": 1, TOO_LARGE: 1, REFUSED: 1,
              "loss_nan": 1, "gradient_nan": 1}
"""Of that at max_staleness 1, where it is not the bits that must be the same, but the books."""
SCATTERED = {"node_lost": 1, "partition": 1, "generator_kill": 1, "generator_stop": 1,
             "generator_kill_in_publication": 1}
"""Of that on a cluster of several nodes, one for each generator."""


@dataclass(frozen=True)
class Trial:
    """One run to make."""

    name: str
    kinds: tuple[str, ...]
    """Of its faults; they may repeat."""
    max_staleness: int
    seed: int
    several_nodes: bool = False

    @property
    def same(self) -> bool:
        """Whether the results must be those of the run without a fault."""
        return self.max_staleness == 0 and not any(KINDS[kind].changes_results for kind in self.kinds)

    @property
    def steps(self) -> int:
        """Of the run."""
        return max(FEWEST_STEPS, math.ceil(STEPS_A_FAULT * len(self.kinds)), fewest_steps(self.kinds, SAVED_EVERY))


def trials(seed: int, minutes: float, only: Sequence[str] = (), disk: bool = True) -> list[Trial]:
    """The runs of one round, short ones first. In less than the usual time there are fewer faults of each kind, and
    then fewer kinds.

    Args:
        disk: whether there is one that may be filled.
    """
    if only:
        kinds = _some({kind: ALONE for kind in only if disk or kind != "disk_full"}, 1.0)
        nodes, others = (tuple(k for k in kinds if (KINDS[k].target == "node") is which) for which in (True, False))
        found = (Trial("alone", others, 0, seed), Trial("alone_scattered", nodes[:SPARE], 0, seed, True))
        return [trial for trial in found if trial.kinds]
    share = min(1.0, minutes / USUAL_MINUTES)
    wanted = {kind: number for kind, number in SYNCHRONOUS.items() if disk or kind != "disk_full"}
    return [Trial("scattered", _some(SCATTERED, share), 0, seed + 2, True),
            Trial("overlapped", _some(OVERLAPPED, share), 1, seed + 1),
            Trial("synchronous", _some(wanted, share), 0, seed)]


def _some(wanted: dict[str, int], share: float) -> tuple[str, ...]:
    """Kinds in turns, each as often as wanted, cut to a share."""
    left, order = Counter(wanted), list[str]()
    while left := +left:
        order += left
        left -= Counter(dict.fromkeys(left, 1))
    return tuple(order[: max(1, round(share * len(order)))])


def rounds(seed: int, minutes: float, only: Sequence[str], place: Path) -> Iterator[Finished]:
    """Make runs: one round, and more for as long as there is time for another.

    Raises:
        KeyboardInterrupt, SystemExit: who started chaos asked it to stop; the run under way has been yielded.
    """
    began, longest, number = time.monotonic(), 0.0, 0
    undisturbed: dict[tuple[int, int], Path] = {}
    with small_disk(place) as disk, reward_service() as service:
        ground = Ground.make(place, service)
        if not disk:
            _say("no small disk can be mounted here (that requires root), so none is filled")
        while not number or time.monotonic() - began + longest < 60 * minutes:
            start = time.monotonic()
            for trial in trials(seed + 100 * number, minutes, only, disk):
                shape = trial.steps, trial.max_staleness
                if shape not in undisturbed:
                    undisturbed[shape] = _undisturbed(ground, trial)
                finished = _made(ground, trial, undisturbed[shape], number + 1)
                yield finished
                if finished.record.interruption is not None:
                    raise finished.record.interruption
            longest, number = max(longest, time.monotonic() - start), number + 1


def _undisturbed(ground: Ground, trial: Trial) -> Path:
    _say(f"{trial.steps} updates at max_staleness {trial.max_staleness} without a fault")
    config, directory = ground.configure(f"{trial.name}_undisturbed", trial.steps, trial.max_staleness)
    record = run(config, directory, (), ground.service)
    if record.interruption is not None:
        raise record.interruption
    if record.starts[-1].code:
        raise RuntimeError(f"the run without a fault ended with {record.starts[-1].code}: "
                           f"{record.starts[-1].last_words()}")
    return directory


def _made(ground: Ground, trial: Trial, undisturbed: Path, number: int) -> Finished:
    faults = plan(trial.seed, trial.kinds, trial.steps, RANKS, SAVED_EVERY)
    _say(f"{trial.name}, round {number}: {trial.steps} updates among {len(faults)} faults of "
         f"{len({fault.kind for fault in faults})} kinds (seed {trial.seed})")
    config, directory = ground.configure(f"{trial.name}_{number}", trial.steps, trial.max_staleness,
                                         trial.several_nodes)
    return looked_through(run(config, directory, faults, ground.service, _say), undisturbed, trial.same)


def looked_through(record: ChaosRun, undisturbed: Path, same: bool) -> Finished:
    """A run that is over, and what can be said of it.

    Args:
        same: whether its results must be those of the undisturbed run, to the bit.
    """
    loops, end = record.strikes.read("loop"), record.starts[-1].ended
    told = json.loads(RunDirectory(undisturbed).summary.read_text())
    rows = list(read_metrics(record.directory))
    pauses = (row.get("checkpoint/pause_seconds") for row in rows)
    return Finished(
        record, outcomes(record), broken(record, undisturbed if same else None),
        undisturbed_s=told["seconds_loop"] * max((row["step"] for row in rows), default=0) / told["steps"],
        books=Books.of(record), loop_s=end - (loops[0]["time"] if loops else record.starts[0].began),
        pauses_s=[seconds for seconds in pauses if seconds is not None])


def _say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)
