"""Workers that die or hang in the middle of a run: replaced, and at max_staleness 0 the result is the same to the bit.

Moments are told by the run itself: its clock knows who is at work on what. Signals go to the pids that workers named.
"""

import io
import signal
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.errors import WorkerError
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import open_for_reading
from tests.cluster.faults import WorkerFault, worker_faults
from tests.cluster.processes import abandoned, descendants, shared_memory
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LEASE_S = 6.0


@dataclass(frozen=True)
class StruckRun:
    """A run that met faults."""

    directory: Path
    met: tuple[WorkerFault, ...]
    events: list[dict[str, Any]]
    """Of faults.jsonl."""
    output: str
    """What it printed."""
    children: list[str]
    """Command lines of processes that were left."""
    segments: set[str]
    """Shared memory that was left."""

    def event(self, worker: str) -> dict[str, Any]:
        """The one event of a worker; its pid must be that of the process that was struck."""
        (event,) = [e for e in self.events if f"{e['role']}/{e['rank']}" == worker]
        (fault,) = [f for f in self.met if f.worker == worker]
        assert (event["pid"], event["incarnation"]) == (fault.pids[0], 1)
        return event


def struck_run(configure, directory: Path, *faults: WorkerFault, **sections: Any) -> StruckRun:
    """A whole run in which every fault is met."""
    from rlhf_ray.stages import ppo

    segments, output = shared_memory(), io.StringIO()
    sections["cluster"] = {"heartbeat_timeout_s": LEASE_S, **sections.get("cluster", {})}
    with worker_faults(*faults), redirect_stdout(output):
        ppo.run(load(PPOConfig, configure(directory, **sections), []))
    assert all(fault.pids for fault in faults), "a fault was never injected"
    return StruckRun(directory, faults, read_faults(directory / "faults.jsonl"), output.getvalue(), descendants(),
                     abandoned(segments))


def assert_the_same(run: StruckRun, undisturbed: Path) -> None:
    """Weights to the bit, the numbers of every step, and what became of every sample."""
    for name in ("model/model.safetensors", "model_ema/model.safetensors"):
        assert (run.directory / name).read_bytes() == (undisturbed / name).read_bytes()
    rows, others = ([without([row], *CLOCKS, TRAFFIC, "faults/") for row in steps(d)]
                    for d in (run.directory, undisturbed))
    assert rows == others
    assert samples(run.directory) == samples(undisturbed)


def assert_accounted_for(run: StruckRun) -> None:
    """The ledger adds up, and knows each attempt that a generator took with it."""
    given_up = sum(e["redispatched"] for e in run.events if e["role"] == "generator")
    with closing(open_for_reading(run.directory / "ledger.sqlite")) as db:
        assert audit(db, ended=True) == []
        assert counts(db)["attempts given up"] == given_up > 0
        reasons = [reason for (reason,) in db.execute("SELECT reason FROM attempts")]
    assert all(any(fault.worker in reason for fault in run.met) for reason in reasons)


def assert_gone(run: StruckRun) -> None:
    """Who was struck is dead, and nothing of the run is left."""
    assert not [pid for fault in run.met for pid in fault.pids if psutil.pid_exists(pid)]
    assert (run.children, run.segments) == ([], set())


@pytest.fixture(scope="module")
def healed(configure, tmp_path_factory):
    """The run of `finished` with faults: at each step another, and at one step both generators are away."""
    return struck_run(
        configure, tmp_path_factory.mktemp("healed") / "run",
        WorkerFault("generator/0", "generate", 1, signal.SIGKILL),
        WorkerFault("generator/1", "generate", 2, signal.SIGSTOP),
        WorkerFault("reward_scorer/0", "reward", 1, signal.SIGKILL),
        WorkerFault("reference_scorer/0", "reference", 2, signal.SIGSTOP),
        WorkerFault("assembler/0", "assemble", 3, signal.SIGKILL))


def test_faults_change_no_bit_of_the_result(healed, finished):
    assert_the_same(healed, finished.directory)


def test_every_attempt_that_was_lost_is_in_the_ledger(healed):
    assert_accounted_for(healed)


def test_who_was_struck_is_dead_and_nothing_is_left(healed):
    assert_gone(healed)


def test_a_killed_generator_is_back_with_the_present_weights(healed):
    event = healed.event("generator/0")
    assert (event["kind"], event["method"]) == ("died", "generate") and event["redispatched"] % 4 == 0
    assert event["recovery_s"] > 1 and event["outcome"] in ("caught up to version 1", "caught up to version 2")


def test_a_stopped_generator_is_found_out_by_its_silence(healed):
    event = healed.event("generator/1")
    assert (event["kind"], event["method"]) == ("hung", "generate")
    assert "gave no sign of life" in event["reason"] or "produced no token" in event["reason"]  # the first to notice
    assert LEASE_S < event["detection_s"] < 3 * LEASE_S and event["recovery_s"] > 1


@pytest.mark.parametrize("worker, kind", [("reward_scorer/0", "died"), ("reference_scorer/0", "hung"),
                                          ("assembler/0", "died")])
def test_a_scorer_and_an_assembler_are_replaced_and_asked_again(healed, worker, kind):
    event = healed.event(worker)
    assert (event["kind"], event["redispatched"] > 0, event["recovery_s"] > 0) == (kind, True, True)


def test_a_person_is_told_of_each_loss_and_return_in_a_line(healed):
    pid = healed.event("generator/0")["pid"]
    lines = [line for line in healed.output.splitlines() if "generator/0" in line]
    assert len(lines) == 2 and lines[0].startswith("PPO: warning: generator/0 died in generate")
    assert f"(pid {pid}); it is restarted" in lines[0] and "generator/0 is back after" in lines[1]
    assert "unexpected system error" not in healed.output


def test_metrics_count_the_lost_workers(healed):
    rows = steps(healed.directory)
    assert sum(row["faults/lost_workers"] for row in rows) == 5
    assert sum(row["faults/seconds_down"] for row in rows) > 2


@pytest.mark.parametrize("signal_number, kind", [(signal.SIGKILL, "broke"), (signal.SIGSTOP, "hung")])
def test_vllm_s_own_process_may_die_or_hang(configure, tmp_path, finished, signal_number, kind):
    """The worker lives on, and would say that all is well; nothing of either is left behind."""
    run = struck_run(configure, tmp_path / "run", WorkerFault("generator/0", "generate", 1, signal_number, process=1),
                     generator={"engine": "async", "workers": 1})
    assert_the_same(run, finished.directory)
    assert_accounted_for(run)
    assert_gone(run)
    event = run.event("generator/0")
    assert event["kind"] == kind and len(run.met[0].pids) > 1


def test_a_generator_that_dies_at_every_call_ends_the_run_with_a_checkpoint_to_go_on_from(
        configure, tmp_path, finished):
    from rlhf_ray.stages import ppo

    config = load(PPOConfig, configure(tmp_path / "run", generator={"workers": 1}, cluster={"max_restarts": 1}), [])
    faults = [WorkerFault("generator/0", "generate", 1, signal.SIGKILL) for _ in range(2)]
    with struck_one_after_the_other(*faults), pytest.raises(WorkerError, match="once more after 1 restarts") as caught:
        ppo.run(config)
    assert "generator/0 was lost" in str(caught.value) and faults[0].pids != faults[1].pids
    assert descendants() == []
    ppo.run(config, resume=True)
    assert_the_same(StruckRun(tmp_path / "run", (), [], "", [], set()), finished.directory)


def test_generators_that_are_left_finish_a_run_whose_other_one_cannot_be_replaced(configure, tmp_path, finished):
    run = struck_run(configure, tmp_path / "run", WorkerFault("generator/0", "generate", 1, signal.SIGKILL),
                     cluster={"max_restarts": 0})
    assert_the_same(run, finished.directory)
    assert_accounted_for(run)
    assert_gone(run)
    event, rows = run.events[0], steps(run.directory)
    assert event["recovery_s"] is None and "was lost once more after 0 restarts" in event["outcome"]
    assert event["outcome"].startswith("not replaced yet, the others of generator go on")
    assert "The others of generator go on; it is started again in 15 s" in run.output
    assert max(row["faults/missing_workers"] for row in rows) == 1


@contextmanager
def struck_one_after_the_other(*faults: WorkerFault):
    """`struck`, where one worker meets several faults: each its own incarnation."""
    inject = WorkerFault.inject

    def in_turn(fault: WorkerFault, coordinator: Coordinator) -> None:
        role, rank = fault.worker.split("/")
        (group,) = [group for group in coordinator.roles.groups() if group.role == role]
        if group.incarnation(int(rank)) == 1 + faults.index(fault):
            inject(fault, coordinator)

    with pytest.MonkeyPatch.context() as patch, worker_faults(*faults):
        patch.setattr(WorkerFault, "inject", in_turn)
        yield
