"""Who gets a run's directory: one driver of many, at once where the last one is known to be dead, after a minute of
silence where that cannot be known; and how an owner notices that it is none any more."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_ray.errors import ConfigError, SupersededError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability import ownership, run_directory
from rlhf_ray.observability.owner_record import ProcessIdentity, Record, Term, read_owner
from rlhf_ray.observability.ownership import SILENT_S, Ownership, claim
from rlhf_ray.observability.run_directory import RunDirectory
from tests.unit.owners import Watch, host, take_over


def must_not_wait(_):
    raise AssertionError("it waits")


def claim_here(directory, process=None):
    return claim(directory, process or ProcessIdentity.own(), must_not_wait, sleep=must_not_wait)


def records(directory):
    return sorted(path.name for path in (directory / "owner").iterdir())


def test_terms_follow_each_other_and_one_record_remains(tmp_path):
    first = claim_here(tmp_path)
    Ownership(first).renew(ended=True)
    second = claim_here(tmp_path, host("b"))
    assert (first.number, second.number, records(tmp_path)) == (1, 2, ["term_2.json"])
    record = read_owner(tmp_path)
    assert (record.process, record.before, record.ended) == (host("b"), None, False)


def test_a_live_owner_of_this_machine_is_respected_at_once(tmp_path):
    claim_here(tmp_path)
    here = ProcessIdentity.own()
    with pytest.raises(ConfigError, match=f"by another run, process {here.pid} on {here.host}, since 20.*wait for"):
        claim_here(tmp_path)


def child():
    """A process of this machine, and who it is."""
    process = subprocess.Popen(["sleep", "60"])
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return process, replace(ProcessIdentity.own(), pid=process.pid, started=int(stat[19]))


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "a zombie"])
def test_an_owner_of_this_machine_that_was_killed_is_succeeded_at_once(tmp_path, reaped):
    process, identity = child()
    claim_here(tmp_path, identity)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="being written"):  # it may go on at any moment
        claim_here(tmp_path)
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert claim_here(tmp_path).number == 2
    process.wait()


@pytest.mark.parametrize("change", [{"started": 1}, {"pid": 2**22 + 1}], ids=["its number is another's", "no process"])
def test_a_process_that_merely_has_the_number_is_no_owner(tmp_path, change):
    claim_here(tmp_path, replace(ProcessIdentity.own(), **change))
    assert claim_here(tmp_path).number == 2


@pytest.mark.parametrize("change", [{"host": "x"}, {"boot": "x"}, {"pid_namespace": 1}], ids=str)
def test_processes_of_another_host_boot_or_container_cannot_be_asked(change):
    here = ProcessIdentity.own()
    assert here.lives(here) is True and here.lives(replace(here, **change)) is None


def test_a_silent_owner_of_elsewhere_is_succeeded_after_its_time(tmp_path):
    Watch().claim(tmp_path, host("a"))
    watch = Watch()
    assert watch.claim(tmp_path, host("b")).number == 2 and SILENT_S <= watch.now <= SILENT_S + 2
    (line,) = watch.said
    assert "owned by process 4711 on a, seen last at 20" in line and "waiting up to 60 s to see whether" in line


def test_an_owner_of_elsewhere_that_gives_a_sign_of_life_is_respected(tmp_path):
    first = Ownership(Watch().claim(tmp_path, host("a")))
    watch = Watch(events={50.0: first.renew})
    with pytest.raises(ConfigError, match="being written by another run, process 4711 on a"):
        watch.claim(tmp_path, host("b"))
    assert watch.now <= 52 and records(tmp_path) == ["term_1.json"]


def test_an_owner_of_elsewhere_that_leaves_is_not_waited_for(tmp_path):
    first = Ownership(Watch().claim(tmp_path, host("a")))
    watch = Watch(events={5.0: lambda: first.renew(ended=True)})
    assert watch.claim(tmp_path, host("b")).number == 2 and watch.now < 7


def test_time_in_which_the_disk_or_the_challenger_stood_still_does_not_count(tmp_path):
    Watch().claim(tmp_path, host("a"))
    watch = Watch()

    def stand_still():
        watch.now += 300

    watch.events = {40.0: stand_still}
    watch.claim(tmp_path, host("b"))
    assert watch.now >= 340 + SILENT_S


def test_a_claim_that_was_not_finished_is_watched_like_an_owner_of_elsewhere(tmp_path):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner/term_5.json").touch()
    watch = Watch()
    assert watch.claim(tmp_path, host("b")).number == 6 and watch.now >= SILENT_S
    assert "being claimed by another driver" in watch.said[0]


CHALLENGER = """
import sys, time
from pathlib import Path
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.ownership import claim
from rlhf_ray.observability.owner_record import ProcessIdentity
directory = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    print(claim(directory, ProcessIdentity.own(), lambda _: None).number, flush=True)
except ConfigError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


def test_of_many_processes_that_succeed_a_dead_one_at_the_same_moment_one_wins(tmp_path):
    claim_here(tmp_path, replace(ProcessIdentity.own(), started=1))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    challengers = [subprocess.Popen([sys.executable, "-c", CHALLENGER, str(tmp_path)], **pipes) for _ in range(6)]
    for process in challengers:
        assert process.stdout.readline() == "ready\n"
    for process in challengers:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.stdout.readline().strip() for process in challengers]
    winners = [process for process, line in zip(challengers, said, strict=True) if line == "2"]
    for process in challengers:
        process.communicate()
    (winner,) = winners
    assert sum(f"being written by another run, process {winner.pid} on" in line for line in said) == 5
    assert records(tmp_path) == ["term_2.json"]


def test_of_many_threads_one_wins_however_often(tmp_path):
    for attempt in range(6):
        here, gate = tmp_path / str(attempt), threading.Barrier(8)
        here.mkdir()

        def challenge(_, here=here, gate=gate):
            gate.wait()
            try:
                return claim(here, ProcessIdentity.own(), lambda _: None).number
            except ConfigError:
                return None

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(challenge, range(8)), key=str) == [1, *[None] * 7]


def test_a_challenger_that_comes_back_to_a_term_long_over_does_not_get_it(tmp_path, monkeypatch):
    """It saw that term 1 is over, and meanwhile another driver had term 2 and left, and a third one has term 3."""
    Ownership(Watch().claim(tmp_path, host("a"))).renew(ended=True)
    create = ownership._create

    def late(term, record):
        monkeypatch.setattr(ownership, "_create", create)
        Ownership(Watch().claim(tmp_path, host("b"))).renew(ended=True)
        Watch().claim(tmp_path, ProcessIdentity.own())
        return create(term, record)

    monkeypatch.setattr(ownership, "_create", late)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        claim_here(tmp_path)
    assert records(tmp_path) == ["term_3.json"]


def test_an_owner_notices_its_succession_and_touches_nothing(tmp_path):
    first, told = Ownership(Watch().claim(tmp_path, host("a"))), []
    first.when_lost(lambda: told.append(True))
    first.renew()
    assert first.lost is None
    take_over(tmp_path)
    before = read_owner(tmp_path)
    for _ in range(2):
        first.renew()
    assert told == [True] and "taken over by process 4711 on b (term 2)" in str(first.lost)
    assert read_owner(tmp_path) == before and records(tmp_path) == ["term_2.json"]
    with pytest.raises(SupersededError, match=r"while this driver \(term 1\) gave no sign of life"):
        first.term.check()
    assert first.lost.exit_code == 77


def test_a_successor_that_died_before_it_removed_the_record_counts_as_well(tmp_path):
    first = Watch().claim(tmp_path, host("a"))
    Term(tmp_path, 2).path.write_bytes(Record(2, host("b"), 0.0, 0.0).encoded())
    with pytest.raises(SupersededError):
        first.check()


def test_a_record_that_cannot_be_renewed_is_told_of_once_and_tried_again(tmp_path, monkeypatch):
    said = []
    mine = Ownership(claim_here(tmp_path), said.append)

    def hang(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_ray.observability.ownership.os.pwrite", hang)
        for _ in range(3):
            mine.renew()
    assert len(said) == 1 and "cannot be renewed (Input/output error); the run continues" in said[0]
    assert mine.lost is None
    mine.renew()
    assert read_owner(tmp_path).beat == 1


def test_a_thread_renews_the_record_and_closes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_ray.observability.ownership.BEAT_S", 0.001)
    with RunDirectory(tmp_path).owned() as mine:
        beaten = threading.Event()
        write = mine._write

        def count(**changes):
            write(**changes)
            if changes.get("beat", 0) >= 3 and not beaten.is_set():  # this function may come late
                beaten.set()
                raise RuntimeError("a bug")  # does not end the thread

        mine._write = count
        assert beaten.wait(20)
        mine.go_on_from(7)
    found = read_owner(tmp_path)
    assert found.ended and found.went_on_from == 7 and found.beat >= 3


def test_files_are_written_by_the_owner_alone(tmp_path):
    mine = RunDirectory(tmp_path)
    with mine.owned():
        mine.write_json("summary.json", {"of": "a"})
        take_over(tmp_path)
        for write in (lambda: mine.write_json("summary.json", {}), lambda: mine.write_text("config.yaml", "")):
            with pytest.raises(SupersededError, match="term 2"):
                write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner", "summary.json"]
    assert "a" in mine.summary.read_text()


def test_a_write_that_was_stopped_before_its_rename_finds_nothing_to_rename(tmp_path, monkeypatch):
    """The driver passed its check, stood still, and goes on when another one has taken over and begun."""
    mine, target, rename = RunDirectory(tmp_path), tmp_path / "summary.json", os.replace
    with mine.owned():

        def late(source, destination):
            assert Path(source).name.startswith(".summary.json.t1-")
            monkeypatch.setattr(os, "replace", rename)
            with monkeypatch.context() as patch:
                patch.setattr(run_directory, "claim", lambda directory, *_: take_over(directory))
                with RunDirectory(tmp_path).owned():
                    target.write_text("of b")
            rename(source, destination)

        monkeypatch.setattr(os, "replace", late)
        with pytest.raises(SupersededError):
            write_atomically(target, b"of a", mine.term)
    assert target.read_text() == "of b"


def test_what_a_successor_is_writing_is_left_alone(tmp_path):
    for name in (".status.json.t1-abcdefgh", ".status.json.t3-abcdefgh", ".status.json.abcdefgh"):
        (tmp_path / name).touch()
    Term(tmp_path, 1).path.parent.mkdir()
    Term(tmp_path, 1).path.write_bytes(Record(1, host("a"), 0.0, 0.0, ended=True).encoded())
    with RunDirectory(tmp_path).owned():
        assert [path.name for path in tmp_path.glob(".*")] == [".status.json.t3-abcdefgh"]
