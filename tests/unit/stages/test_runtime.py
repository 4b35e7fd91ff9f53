"""How a stage's coroutine ends, and what its learners are told."""

import asyncio
import gc
from contextlib import suppress
from types import SimpleNamespace

import pytest

from rlhf_ray.config.derived import derive
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import CheckpointError, SupersededError, WorkerError
from rlhf_ray.observability.ownership import Ownership
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.stages.runtime import Runtime, kept_if_refused, run_async, while_owned
from tests.unit.owners import Watch, host, take_over


@pytest.mark.parametrize(("made", "kept"), [(8, "former"), (9, "new")])
def test_a_resume_that_makes_no_step_leaves_the_configuration_as_it_was(tmp_path, made, kept):
    run = RunDirectory.create(tmp_path)
    (run.checkpoints / "step_8").mkdir(parents=True)
    run.config.write_text("former")
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, made + 1)))
    with pytest.raises(CheckpointError), kept_if_refused(run, resume=True):
        run.config.write_text("new")
        raise CheckpointError("the rows are not those that the run began with")
    assert run.config.read_text() == kept
    with kept_if_refused(run, resume=True):
        run.config.write_text("accepted")
    assert run.config.read_text() == "accepted"


async def give(value):
    return value


async def cancel():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


def test_a_coroutine_runs_to_its_value():
    assert run_async(give(3)) == 3


def test_being_cancelled_is_being_interrupted():
    with pytest.raises(KeyboardInterrupt):
        run_async(cancel())


@pytest.mark.parametrize("ends", ["by itself", "by the thread that renews the record"])
def test_a_stage_whose_directory_was_taken_over_ends_with_that_whatever_else_went_wrong(tmp_path, ends):
    async def main():
        take_over(tmp_path)
        if ends == "by itself":
            raise WorkerError("all workers were silent for a minute")
        await asyncio.to_thread(ownership.renew)
        await asyncio.sleep(60)

    ownership = Ownership(Watch().claim(tmp_path, host("a")))
    with pytest.raises(SupersededError, match="taken over by process 4711 on b"):
        run_async(while_owned(ownership, main()))


def test_a_stage_that_owns_its_directory_ends_as_it_does(tmp_path):
    ownership = Ownership(Watch().claim(tmp_path, host("a")))
    assert run_async(while_owned(ownership, give(3))) == 3
    with pytest.raises(KeyboardInterrupt):
        run_async(while_owned(ownership, cancel()))


async def farewell(hurry):
    """What is ended, and what asyncio has to complain of, when a worker takes its time to say goodbye."""
    ended, complaints = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    place = Runtime(config(), None)
    place._groups.append((SimpleNamespace(values=lambda _: asyncio.sleep(60), kill=lambda: ended.append("it")), "bye"))
    leaving = asyncio.create_task(place.shut_down(0.1))
    await asyncio.sleep(0.01)
    if hurry:
        leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    del leaving
    gc.collect()
    return ended, complaints


@pytest.mark.parametrize("hurry", [False, True], ids=["until its time is over", "until somebody is in a hurry"])
def test_workers_that_take_their_time_to_say_goodbye_are_ended_without_a_word(hurry):
    assert asyncio.run(farewell(hurry)) == (["it"], [])


def config(**sections):
    return PPOConfig(model={"path": "m"}, rewards={"main": {"type": "model", "path": "r"}}, prompts={"path": "p"},
                     run={"steps": 10, "seed": 3}, **sections)


def arguments(learner, it, rank=0):
    return learner.arguments(it, derive(it), rank)


def test_learners_know_their_optimizer_steps_and_the_policy_rests_while_the_critic_warms_up():
    it = config(algorithm={"epochs": 2, "mini_batches": 4, "critic_warmup_steps": 3}, policy={"workers": 2},
                pools={"default": {"cpus": 2}})
    policy, critic = arguments(PolicyLearner, it, 1), arguments(CriticLearner, it)
    assert (policy["total_steps"], critic["total_steps"]) == (7 * 8, 10 * 8)
    assert (policy["rank"], policy["world"], policy["seed"]) == (1, 2, 3)
    assert policy["model"] is it.model and policy["algorithm"] is it.algorithm and policy["config"] is it.policy


@pytest.mark.parametrize("init, path", [("policy", "m"), ("reward", "r")])
def test_the_critic_starts_from_what_is_configured(init, path):
    it = config(critic={"init": init})
    assert arguments(CriticLearner, it)["model"].path == path
    assert arguments(PolicyLearner, it)["model"].path == "m"


def test_a_policy_that_never_learns_still_has_a_schedule():
    assert arguments(PolicyLearner, config(algorithm={"critic_warmup_steps": 9}))["total_steps"] == 8
