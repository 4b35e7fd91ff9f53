"""Lost messages: the environment variable for Ray, and the loss that the run's files show."""

import json

import pytest

from chaos.faults import KILL, Fault
from chaos.kinds import KINDS, kind_of
from chaos.message_loss import (
    log_loss,
    lose_messages_of_this_process_only,
    lost_at_the_start,
)
from chaos.outcomes import outcomes
from chaos.plan import plan
from rlhf_ray.errors import WorkerError
from rlhf_ray.internals.ray import CALL_MESSAGE, LOSE_MESSAGES

ACTOR = "generator/1 died in generate: The actor 0a is unavailable: The actor is temporarily unavailable: "
SAID, RESET = f"{ACTOR}RpcError: Unavailable rpc_code: 14", f"{ACTOR}RpcError: RPC error: Connection reset by peer"


def test_a_driver_gets_one_lost_message_of_the_kind_that_is_asked_for():
    request, reply = (json.loads(KINDS[kind].environment(Fault(1, kind, 1))[LOSE_MESSAGES])[CALL_MESSAGE]
                      for kind in ("request_lost", "reply_lost"))
    assert (request["num_failures"], request["req_failure_prob"], request["resp_failure_prob"]) == (1, 1, 0)
    assert (reply["num_failures"], reply["req_failure_prob"], reply["resp_failure_prob"]) == (1, 0, 1)
    assert KINDS["reward_kill"].environment(Fault(1, "reward_kill", 1)) == {}


def test_ray_s_own_processes_lose_nothing(monkeypatch):
    from ray._private import services

    started = []
    monkeypatch.setattr(services, "start_ray_process", lambda *args, **settings: started.append((args, settings)))
    monkeypatch.setenv(LOSE_MESSAGES, "{}")
    lose_messages_of_this_process_only()
    services.start_ray_process("gcs", env_updates={"ONE": "1"}, cwd="/")
    assert started == [(("gcs",), {"env_updates": {"ONE": "1", LOSE_MESSAGES: ""}, "cwd": "/"})]


def lose(fake_run, code=0, said=""):
    """A run with one driver that should lose a message; the loss is logged."""
    fake_run.start(100, 200, code, code, said)
    fake_run.fault("request_lost")
    log_loss(fake_run.record, fake_run.record.starts[0], fake_run.record.faults[0])
    return fake_run.record


def test_the_loss_is_the_one_whose_message_ray_lost(fake_run):
    fake_run.event("generator", 7, 111, 6.0, reason=RESET)
    fake_run.event("generator", 8, 120, 5.0, reason="it died")
    fake_run.event("generator", 9, 130, 4.0, reason=SAID)
    (outcome,) = outcomes(lose(fake_run))
    assert outcome.survived and outcome.recovery_s == 4.0


def test_a_loss_of_another_kind_or_time_is_none(fake_run):
    fake_run.event("generator", 7, 111, 6.0, reason=RESET)
    fake_run.event("generator", 7, 99, 6.0, reason=SAID)
    (outcome,) = outcomes(lose(fake_run))
    assert not outcome.injected


def test_a_loss_while_workers_start_ends_the_driver_and_the_next_one_goes_on(fake_run):
    assert lost_at_the_start(WorkerError.exit_code, SAID) and not lost_at_the_start(WorkerError.exit_code, RESET)
    record = lose(fake_run, WorkerError.exit_code, SAID)
    assert not outcomes(record)[0].survived
    fake_run.line("loop", 230, step=0)
    (outcome,) = outcomes(record)
    assert outcome.survived and outcome.recovery_s == 30


def test_a_loss_that_a_killed_driver_did_not_record_is_not_injected(fake_run):
    record = lose(fake_run, -KILL, SAID)
    fake_run.line("loop", 220, step=0)
    (outcome,) = outcomes(record)
    assert not outcome.injected and not outcome.survived


@pytest.mark.parametrize("seed", range(10))
def test_a_message_is_lost_in_a_driver_that_is_started_again(seed):
    faults = plan(seed, ("request_lost", "reply_lost", "http_500", "driver_term"), 30, {}, 3)
    for fault in faults:
        if kind_of(fault).follows_an_end:
            assert kind_of(faults[fault.number - 2]).ends_the_driver
