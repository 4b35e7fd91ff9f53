"""The role table and the facts beside the sections agree, and name only what exists."""

import inspect
from importlib.resources import files

import pytest

from rlhf_ray.config.derived import derive, placements_of
from rlhf_ray.config.fields import sections_of
from rlhf_ray.config.load import STAGES
from rlhf_ray.config.run import STATIONS, PlacementConfig
from rlhf_ray.config.stages import PPOConfig, role_facts
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.role_table import ASSEMBLED, ROLE_TABLE, rows_of, scorer_rows

FACTS = role_facts(PPOConfig)
SCORERS = scorer_rows()
GENERATED = {"rollouts", "prompts"}
"""Columns of a chunk that was generated."""
SETTINGS = {
    "usual": {},
    "no reference": {"algorithm": {"kl": {"coef": 0.0, "kind": "fixed"}}},
    "one backbone": {"critic": {"backbone": "policy"}},
    "no critic": {"algorithm": {"estimator": "reinforce"}},
}


def ppo_config(**sections):
    return PPOConfig(model={"path": "m"}, rewards={"main": {"type": "model", "path": "r"}}, prompts={"path": "p"},
                     **sections)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_every_section_with_a_placement_has_facts(stage):
    placed = {name for name, field in stage.model_fields.items()
              if any(issubclass(section, PlacementConfig) for section in sections_of(field.annotation))}
    assert placed == role_facts(stage).keys()


def test_every_section_of_a_ppo_run_has_a_row():
    assert list(dict.fromkeys(row.section for row in ROLE_TABLE)) == list(FACTS)


@pytest.mark.parametrize("section", FACTS)
def test_the_facts_of_a_role_name_what_exists(section):
    facts = FACTS[section]
    assert facts.station in STATIONS
    assert f"({section}.workers)" in facts.advice
    css = files("rlhf_ray.observability").joinpath("assets/report.css").read_text()
    assert f"--{facts.colour}:" in css


def test_no_two_roles_have_the_same_worker_or_phase():
    workers = [facts.worker for facts in FACTS.values()]
    phases = [phase for facts in FACTS.values() for phase in (facts.phase, facts.passes) if phase]
    assert len(set(workers)) == len(workers) and len(set(phases)) == len(phases)


@pytest.mark.parametrize("row", ROLE_TABLE, ids=lambda row: row.cls.__name__)
def test_the_methods_of_a_row_are_its_class_s(row):
    for method in filter(None, (row.shutdown, getattr(row, "method", None))):
        assert getattr(row.cls, method.__name__) is method


def parameters_of(method):
    """But for `self`, and for one that Ray adds to methods of classes that it has made actors of."""
    return [name for name in list(inspect.signature(method).parameters)[1:] if not name.startswith("_ray")]


@pytest.mark.parametrize("row", SCORERS, ids=lambda row: row.section)
def test_a_scorer_reads_what_was_generated_and_fills_a_column_of_its_own(row):
    assert set(row.reads) <= GENERATED
    assert parameters_of(row.method) == list(row.reads)
    assert [other.column for other in SCORERS].count(row.column) == 1 and row.column not in GENERATED


def test_all_that_the_assembler_reads_is_filled():
    terms, rollouts, *columns = parameters_of(Assembler.assemble)
    assert (terms, rollouts, sorted(columns)) == ("terms", "rollouts", sorted(ASSEMBLED))
    assert set(ASSEMBLED) - {row.column for row in SCORERS} == {"old_logprobs", "values"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_has_one_row_for_each_role_that_it_starts_and_arguments_that_its_class_takes(name):
    config = ppo_config(**SETTINGS[name])
    derived = derive(config)
    rows = rows_of(config, derived)
    assert [row.section for row in rows] == list(placements_of(config))
    for row in rows:
        inspect.signature(row.cls).bind(**row.cls.arguments(config, derived, 0))


def test_one_model_is_policy_and_critic_where_they_share_the_backbone():
    def policy(**sections):
        config = ppo_config(**sections)
        (row,) = [row for row in rows_of(config, derive(config)) if row.section == "policy"]
        return row.cls

    assert policy() is PolicyLearner
    assert policy(critic={"backbone": "policy"}) is ActorCriticLearner
