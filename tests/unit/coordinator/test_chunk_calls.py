"""A scorer needs no more than its row to be called for generated chunks and to fill its column."""

import asyncio

import pytest

from rlhf_ray.config.run import RoleFacts
from rlhf_ray.records import RewardTerms, SampleKey
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.workers import role_table
from rlhf_ray.workers.role_table import ScorerRow
from tests.unit.coordinator.stand_ins import StandInGroup, calls_of, role_groups_of


class Judge:
    """A role without a place in the coordinator's code."""

    def judge(self, prompts, rollouts):
        """Never called: a stand-in answers."""


@pytest.fixture
def judged(monkeypatch, ppo_config, summary):
    """judged(evaluating, **row): of two chunks scored by this row too the columns, the verdicts, the roles and phases
    whose work was noted, and the columns that the assembler was given."""

    def run(evaluating=False, **of_row):
        row = ScorerRow("judge", Judge, method=Judge.judge, reads=("prompts", "rollouts"), column="verdicts", **of_row)
        facts = role_table.role_facts(role_table.PPOConfig)
        facts["judge"] = RoleFacts(worker="judge", station="scoring", phase="judging")
        monkeypatch.setattr(role_table, "ROLE_TABLE", (*role_table.ROLE_TABLE, row))
        monkeypatch.setattr(role_table, "role_facts", lambda stage: facts)
        given = {}

        async def judge(rank, method, prompts, rollouts):
            return [f"{prompt}, {rollout}" for prompt, rollout in zip(prompts, rollouts, strict=True)]

        async def assemble(rank, method, terms, rollouts, **columns):
            given.update(columns)
            return *rollouts, [summary([SampleKey(0, 0, 0)])] * len(rollouts)

        async def go():
            roles = role_groups_of(assembler=assemble)
            roles.by_section["judge"] = StandInGroup("judge", judge)
            calls = calls_of(ppo_config(), roles)
            chunks = [Chunk.outside([SampleKey(0, row, 0)]) for row in range(2)]
            for chunk in chunks:
                row = chunk.keys[0].row
                chunk.prompts, chunk.rollout = f"prompt {row}", f"rollout {row}"
            began = roles.clock.now()
            columns = await calls.score(chunks, held_out=evaluating)
            await calls.assemble(chunks, columns, RewardTerms(kl_coef=0.0))
            spans = {span.role for span in roles.clock.work(began, roles.clock.now())}
            verdicts = await columns["verdicts"] if "verdicts" in columns else None
            return columns.keys(), verdicts, spans

        return (*asyncio.run(go()), given.keys())

    return run


def test_a_scorer_reads_its_columns_by_name_and_fills_one(judged):
    columns, verdicts, spans, assembled = judged()
    assert columns == {"reference", "rewards", "verdicts"}
    assert verdicts == ["prompt 0, rollout 0", "prompt 1, rollout 1"]
    assert {"judge", "phase:judging", "phase:reward", "phase:reference"} <= spans
    assert assembled == set(role_table.ASSEMBLED), "experience is made of the columns of that name alone"


@pytest.mark.parametrize(("needed", "columns"), [
    (False, {"reference", "rewards"}), (True, {"reference", "rewards", "verdicts"})])
def test_an_evaluation_calls_the_scorers_that_it_needs_alone(judged, needed, columns):
    found, *_ = judged(evaluating=True, held_out=needed)
    assert found == columns
