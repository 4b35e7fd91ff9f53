"""What the witness says of a run: samples lost, samples trained on twice, and whatever else the journals contradict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

from chaos.witness.agents import agent_problems
from chaos.witness.data_order import DataOrder, Tokens
from chaos.witness.episodes import Assembled, EpisodeOrder, as_segments
from chaos.witness.history import History, OptimizerStep, surviving
from chaos.witness.journals import REFUSED, SCORED, SERVICE, WEIGHTS, read_environments, read_journal
from chaos.witness.versions import Versions, version_problems
from chaos.witness.weights import digest_of

POLICY, CRITIC = "policy_learner", "critic_learner"
SHOWN = 3
"""Rows in a sentence."""


@dataclass(frozen=True)
class Plan:
    """What a configuration says about the samples to train on."""

    order: DataOrder
    steps: int
    prompts: int
    """Of an update."""
    samples: int
    """Of a prompt."""
    epochs: int
    """Of an update; `mini_batches` is the number of optimizer steps of each."""
    mini_batches: int
    max_staleness: int
    ranks: Mapping[str, int]
    """Number of ranks of each learner."""
    model: Path
    temperature: float
    filters: bool
    """Whether prompts whose samples have equal scores are left out."""

    @classmethod
    def read(cls, config: Path, journals: Path) -> Plan:
        """The plan in a run's configuration, which names what the witness must know. The journals of environments say
        to which samples rows belong."""
        given = yaml.safe_load(config.read_text())
        loop, algorithm = given["coordinator"], given["algorithm"]
        prompts, seed, environments = Path(given["prompts"]["path"]), given["run"]["seed"], given.get("environments")
        order = DataOrder.read(prompts, given["prompts"]["max_tokens"], seed) if not environments else EpisodeOrder.of(
            prompts, seed, Path(given["model"]["path"]), read_environments(journals), environments)
        return cls(order, given["run"]["steps"], loop["prompts_per_step"], loop["samples_per_prompt"],
                   algorithm["epochs"], algorithm["mini_batches"], loop.get("max_staleness", 0),
                   {role: given[section]["workers"] for role, section in ((POLICY, "policy"), (CRITIC, "critic"))
                    if given.get(section)},
                   Path(given["model"]["path"]), given["generator"]["sampling"].get("temperature", 1.0),
                   bool(algorithm.get("dynamic_sampling")))


@dataclass
class WitnessReport:
    """The result, in samples."""

    trained: int = 0
    lost: int = 0
    """Samples of the enumeration that some learner did not train on in some epoch of their update."""
    duplicated: int = 0
    """Samples that some learner trained on although the enumeration has no (further) one of their prompt."""
    quarantined: int = 0
    """Samples of prompts that the reward service refused, in the part of the enumeration that the run has visited."""
    filtered: int | None = 0
    """Samples of prompts whose samples all got one score, in the same part; None where that part is not all that was
    drawn."""
    not_applied: int = 0
    """Optimizer steps of ranks that changed no weight."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each contradiction."""


def testify(config: Path, directory: Path, journals: Path) -> WitnessReport:
    """Join the journals of a run that has ended with the enumeration of its data.

    Args:
        config: the run's configuration.
        directory: of the run; only the model in it is read.
        journals: their directory.
    """
    plan = Plan.read(config, journals)
    lines = {f"{role}_{rank}": read_journal(journals, f"{role}_{rank}")
             for role, ranks in plan.ranks.items() for rank in range(ranks)}
    histories = {name: surviving(journal) for name, journal in lines.items()}
    learners = {role: [histories[f"{role}_{rank}"] for rank in range(ranks)] for role, ranks in plan.ranks.items()}
    service, policy = read_journal(journals, SERVICE), learners[POLICY][0]
    refused = {row for line in service if line["event"] == REFUSED
               for row in plan.order.beginning_with(tuple(line["prompt"]))}
    refused |= plan.order.may_be_late if isinstance(plan.order, EpisodeOrder) else set()
    said = WitnessReport(problems=[f"{name}: {problem}" for name, history in histories.items()
                               for problem in history.problems])
    said.not_applied = sum(not step.applied for history in histories.values() for update in history.in_order()
                           for step in update.steps)
    _join_data(plan, learners, refused, _equal(plan, service) if plan.filters else set(), said)
    _join_scores(plan, learners[POLICY], service, said)
    _join_agents(plan, learners[POLICY], read_environments(journals), said)
    said.problems += _disagreements(plan, learners)
    rollouts = [line for line in lines[f"{POLICY}_0"] if line["event"] == "rollouts"]
    said.problems += version_problems(policy, rollouts, Versions(plan.model, journals / WEIGHTS, plan.temperature),
                                      plan.max_staleness)
    model = directory / "model" / "model.safetensors"
    if not model.exists() or digest_of(load_file(model)) != policy.weights_after(plan.steps):
        said.problems.append(f"the run's model does not have the weights after update {plan.steps}")
    return said


def _fed(plan: Plan, learner: Sequence[History], epoch: int, numbers: Iterable[int]) -> Counter[Tokens]:
    """How often the ranks of a learner trained on each row of tokens in an epoch of some updates."""
    return Counter(row for step in _steps(plan, learner, epoch, numbers) for row in step.rows)


def _steps(plan: Plan, learner: Sequence[History], epoch: int, numbers: Iterable[int]) -> Iterator[OptimizerStep]:
    """The optimizer steps of a learner's ranks in an epoch of some updates; further epochs than an update has count as
    the one after the last."""
    return (step for history in learner for number in numbers for update in history.updates.get(number, [])
            for step in update.steps if min(step.index // plan.mini_batches, plan.epochs) == epoch)


def _samples(plan: Plan, learner: Sequence[History], epoch: int, numbers: Sequence[int], said: WitnessReport
             ) -> Assembled:
    """The samples that a learner was given in an epoch of some updates. Of an episode all segments must be there; one
    that is masked counts, though it is in no loss."""
    fed, order = _fed(plan, learner, epoch, numbers), plan.order
    if not isinstance(order, EpisodeOrder):
        found = Assembled()
        for sample, times in fed.items():
            found.whole[order.row_of(sample)] += times
        return found
    found = order.samples_in(fed)
    masked, wrong = order.masked_samples(Counter(
        row for step in _steps(plan, learner, epoch, numbers) for row in step.masked))
    found.whole += masked
    if wrong:
        said.problems.append(f"{_shown(wrong)} were masked, although nothing in their environment was late")
    return found


def _equal(plan: Plan, service: Sequence[dict[str, Any]]) -> set[int]:
    """The rows whose samples, all in one request, got the same score at least once."""
    found: set[int] = set()
    for line in service:
        if line["event"] == SCORED and "scores" in line:
            scores = defaultdict[int | None, list[float]](list)
            for sample, score in zip(line["samples"], line["scores"], strict=True):
                scores[plan.order.row_of(tuple(sample))].append(score)
            found |= {row for row, its in scores.items() if row is not None and len(its) >= plan.samples
                      and min(its) == max(its)}
    return found


def _join_data(plan: Plan, learners: Mapping[str, Sequence[History]], refused: Set[int], equal: Set[int],
               said: WitnessReport) -> None:
    """Compare what each learner trained on in each epoch with the enumeration: over the whole run, and at max_staleness
    0 also in each update."""
    every = sorted({number for learner in learners.values() for history in learner for number in history.updates})
    trained = _samples(plan, learners[POLICY], 0, every, said).whole
    wanted, skipped = _wanted(plan, plan.order.visits(), trained, refused | equal, plan.steps * plan.prompts)
    said.trained, said.quarantined = trained.total(), sum(row in refused for row in skipped) * plan.samples
    for role, learner in learners.items():
        for epoch in range(plan.epochs):
            samples = _samples(plan, learner, epoch, every, said if epoch or role != POLICY else WitnessReport())
            lost, surplus = wanted - samples.whole, samples.whole - wanted + samples.again
            said.lost, said.duplicated = max(said.lost, lost.total()), max(said.duplicated, surplus.total())
            if lost or surplus:
                said.problems.append(f"{role}, epoch {epoch + 1} of its updates: {_shown(lost)} lost, "
                                     f"{_shown(surplus)} too many")
            if samples.partial:
                said.problems.append(f"{role}, epoch {epoch + 1} of its updates: of {_shown(samples.partial)} there "
                                     "are segments, and another one is not")
        if further := _fed(plan, learner, plan.epochs, every).total():
            said.duplicated += further
            said.problems.append(f"{role}: {further} samples in more than {plan.epochs} epochs of an update")
    if plan.max_staleness:
        said.filtered = None
        return
    visits, filtered = plan.order.visits(), 0
    for number in every:
        got = _samples(plan, learners[POLICY], 0, [number], WitnessReport()).whole
        of_update, skipped = _wanted(plan, visits, got, refused | equal, plan.prompts)
        filtered += sum(row not in refused for row in skipped) * plan.samples
        if of_update != got:
            said.problems.append(f"update {number} is the first that trained on other prompts than its own")
            break
    said.filtered = filtered


def _wanted(plan: Plan, visits: Iterator[int], trained: Counter[int | None], left_out: Set[int],
            prompts: int) -> tuple[Counter[int | None], list[int]]:
    """How many samples of each row the next visits require, for a number of prompts; and the rows whose visits were
    skipped, because they may be left out and none of their samples was trained on."""
    wanted, skipped = Counter[int | None](), list[int]()
    for row in visits:
        if row in left_out and trained[row] - wanted[row] < plan.samples:
            skipped.append(row)
            continue
        wanted[row] += plan.samples
        if wanted.total() == prompts * plan.samples:
            break
    return wanted, skipped


def _join_scores(plan: Plan, policy: Sequence[History], service: Sequence[dict[str, Any]], said: WitnessReport) -> None:
    """Check that each sample of an update was scored for it: after the oldest version that it may come from was made,
    and as often as the update has it. One that was not is in the place of another one that is lost."""
    scored = [(line["time"], row) for line in service if line["event"] == SCORED
              for row in as_segments(plan.order, map(tuple, line["samples"]))]
    for number, entries in sorted(policy[0].updates.items()) if service else ():
        oldest = policy[0].updates.get(number - 1 - plan.max_staleness)
        since, until = oldest[-1].ended if oldest else 0.0, entries[0].began
        unscored = _fed(plan, policy, 0, [number]) - Counter(
            sample for time, sample in scored if since <= time <= until)
        if unscored:
            said.lost, said.duplicated = said.lost + unscored.total(), said.duplicated + unscored.total()
            said.problems.append(f"update {number} trained on {unscored.total()} samples that the reward service did "
                                 "not score for it")


def _join_agents(plan: Plan, policy: Sequence[History], lines: Sequence[Mapping[str, Any]], said: WitnessReport
                 ) -> None:
    """Check that the samples of agents are what agents received."""
    if not isinstance(plan.order, EpisodeOrder):
        return
    every = sorted({number for history in policy for number in history.updates})
    samples = _samples(plan, policy, 0, every, WitnessReport())
    said.problems += agent_problems(lines, plan.order.rows_in(
        {line["environment"] for line in lines if line.get("session") and "environment" in line}), samples.turns)


def _disagreements(plan: Plan, learners: Mapping[str, Sequence[History]]) -> Iterator[str]:
    """Updates in which learners or epochs trained on different samples, or ranks ended with different weights."""
    for number in range(1, plan.steps + 1):
        first = _fed(plan, learners[POLICY], 0, [number])
        for role, learner in learners.items():
            others = [epoch + 1 for epoch in range(plan.epochs) if _fed(plan, learner, epoch, [number]) != first]
            if others:
                yield f"update {number}: the samples of {role} in its epochs {others} are not those of {POLICY}'s first"
            if len({history.weights_after(number) for history in learner}) > 1:
                yield f"update {number}: the ranks of {role} have different weights"


def _shown(rows: Counter[int | None]) -> str:
    names = [f"row {row}" if row is not None else "no prompt of the data" for row in list(rows)[:SHOWN]]
    return f"{rows.total()} samples" + (f" ({', '.join(names)}{', ...' if len(rows) > SHOWN else ''})" if rows else "")
