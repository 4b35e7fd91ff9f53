"""The calls that make experience of generated chunks: scoring by the frozen models and by the learners, assembly.

A call processes one chunk, or the chunks of a scoring batch together. If it fails, the error names the call's worker,
role and method and is raised for the whole batch, and no later call of the batch is made.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_ray.config.derived import Derived
from rlhf_ray.errors import WorkerLost
from rlhf_ray.records import RewardTerms, Sifted
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.calls import Call
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.role_table import ASSEMBLED, ScorerRow

Columns = dict[str, Any]
"""What roles have computed for the chunks of a scoring batch, by the names in the role table: a reference, or a list
with a reference for each rank of a learner, empty where no learner was called. A frozen scorer that the run does not
have leaves its column out."""

ENDING_S = 2.0
"""Time for workers to end the calls for chunks that are under way when the run is over, or an evaluation is given up. A
restart of the learners, during which generators and episode runners stay, waits for all of it."""


class ChunkCalls:
    """Calls the roles for chunks, concurrently for any number of them. Has no state of chunks."""

    def __init__(self, roles: RoleGroups, derived: Derived) -> None:
        self._roles = roles
        self._derived = derived
        self._scorers = roles.scorers()
        self._assembler = roles.dispatcher(roles.assembler)
        self._learners_free = asyncio.Event()
        self._learners_free.set()

    @contextmanager
    def forward_passes_held(self) -> Iterator[None]:
        """Delay the learners' forward passes until the enclosed work is over.

        A learner serves one call at a time. Forward passes for chunks that finish during an update would wait for its
        end anyway, and run before the new weights are gathered: generators would wait for passes that are not urgent.
        """
        self._learners_free.clear()
        try:
            yield
        finally:
            self._learners_free.set()

    async def score(self, chunks: Sequence[Chunk], held_out: bool = False) -> Columns:
        """The columns of all frozen scorers in the role table, which are called concurrently; `reference` also if
        the policy's frozen base computes it.

        Args:
            held_out: call only the scorers that an evaluation needs.
        """
        given = {"rollouts": _rollouts(chunks), "prompts": [chunk.prompts for chunk in chunks]}
        calls: dict[str, Coroutine[Any, Any, Any]] = {}
        if self._derived.policy_is_reference:
            calls["reference"] = self._base_logprobs(given["rollouts"])
        for row in self._scorers:
            if row.held_out or not held_out:
                calls[row.column] = self._scored(row, given)
        results = await asyncio.gather(*calls.values())
        return dict(zip(calls, results, strict=True))

    async def _scored(self, row: ScorerRow[Any], given: Mapping[str, list[Any]]) -> Any:
        """Reference to the result of a frozen scorer's call: of `ReferenceScorer.logprobs`, of
        `RewardScorer.score_each`, or of another method in `workers.role_table`."""
        dispatcher = self._roles.dispatcher(self._roles.by_section[row.section])
        columns: dict[str, Any] = {name: given[name] for name in row.reads}
        return (await dispatcher.call(row.method, **columns, phase=row.facts.phase)).ref

    async def learner_passes(self, chunks: Sequence[Chunk]) -> Columns:
        """The columns `old_logprobs`, one for each policy rank (empty if no pass is made for them), and `values`, one
        for each critic rank (empty without a critic)."""
        roles = self._roles
        rollouts = _rollouts(chunks)
        passes = self._derived.old_logprobs == "policy"
        if passes or roles.critic:
            await self._learners_free.wait()
        if self._derived.shares_backbone:
            both = [roles.actor_critic.call(rank, ActorCriticLearner.logprobs_and_values, *rollouts, outputs=2)
                    for rank in range(len(roles.policy))]
            await self._all_ranks(both, "logprobs")
            return {"old_logprobs": [call.refs[0] for call in both], "values": [call.refs[1] for call in both]}
        logprobs = roles.policy.call_all(PolicyLearner.logprobs, *rollouts) if passes else []
        values = roles.critic.call_all(CriticLearner.values, *rollouts) if roles.critic else []
        await asyncio.gather(self._all_ranks(logprobs, "logprobs"), self._all_ranks(values, "values"))
        return {"old_logprobs": [call.ref for call in logprobs], "values": [call.ref for call in values]}

    async def assemble(self, chunks: Sequence[Chunk], columns: Columns, terms: RewardTerms) -> None:
        """Fill each chunk with its experience.

        Args:
            columns: of `score` and `learner_passes`.
            terms: the run's numbers that enter the rewards.
        """
        call, summaries = await self._assembler.call_and_get(
            len(chunks), Assembler.assemble, terms, rollouts=_rollouts(chunks),
            **{name: columns.get(name) for name in ASSEMBLED}, phase="assemble", outputs=len(chunks) + 1)
        for chunk, experience, summary in zip(chunks, call.refs, summaries, strict=False):
            chunk.fill(experience, summary.min_version, summary.nbytes, summary)

    async def sift(self, chunks: Sequence[Chunk], columns: Columns) -> list[Sifted]:
        """The samples of each chunk that are of prompts whose scores differ."""
        return await self._assembler.value(
            Assembler.sift, [chunk.keys for chunk in chunks], columns["rewards"], phase="assemble")

    async def keep(self, chunks: Sequence[Chunk], columns: Columns) -> tuple[list[Chunk], Columns]:
        """The chunks that have samples to keep, whose rollouts are of these from now on, and the columns of these.

        Args:
            columns: of `score`.
        """
        numbers = [range(len(chunk.keys)) if chunk.sifted is None else chunk.sifted.kept for chunk in chunks]
        kept = [chunk for chunk, its in zip(chunks, numbers, strict=True) if its]
        if not kept or all(chunk.sifted is None for chunk in chunks):
            return kept, columns
        call = await self._assembler.call(
            Assembler.keep_samples, [list(each) for each in numbers], rollouts=_rollouts(chunks),
            **{"reference": None, **columns}, phase="assemble", outputs=len(kept) + 2)
        *rollouts, rewards, reference = call.refs
        for chunk, rollout in zip(kept, rollouts, strict=True):
            chunk.rollout = rollout
        return kept, {"rewards": rewards, "reference": reference}

    async def samples_of(self, rollout: Any, numbers: Sequence[int]) -> Any:
        """Reference to the rollout of some samples of a rollout."""
        return (await self._assembler.call(Assembler.select_samples, rollout, numbers, phase="assemble")).ref

    async def _base_logprobs(self, rollouts: Sequence[Any]) -> Any:
        """Reference to the log-probabilities of the policy's frozen base, from all of its ranks."""
        await self._learners_free.wait()
        shares = self._roles.policy.call_all(PolicyLearner.reference_logprobs, *rollouts)
        await self._all_ranks(shares, "reference")
        if len(shares) == 1:
            return shares[0].ref
        return (await self._assembler.call(Assembler.join, *(call.ref for call in shares), phase="assemble")).ref

    async def _all_ranks(self, calls: Sequence[Call[Any]], phase: str) -> None:
        """Wait for the same call to every rank of a learner.

        Raises:
            WorkerLost: a rank was lost. With several ranks, a lost argument counts as a lost rank: the other ranks made
                the pass, so their collectives are out of step with those of that rank. All learners are restarted then.
        """
        try:
            await asyncio.gather(*(self._roles.done(call, phase) for call in calls))
        except WorkerLost as error:
            if error.kind == "result" and len(calls) > 1:
                raise WorkerLost(str(error), error.role, error.rank, error.incarnation, error.method, "broke",
                                 error.age_s) from error
            raise


def _rollouts(chunks: Sequence[Chunk]) -> list[Any]:
    return [chunk.rollout for chunk in chunks]
