"""A driver that was taken for dead and goes on: what it does to checkpoints, exports and copies of the run is refused,
and what the driver after it made stays as it is, whenever the first one was stopped."""

import json
from pathlib import Path

import pytest

from rlhf_ray.checkpoint import atomic_directory
from rlhf_ray.checkpoint.export import replacing_export
from rlhf_ray.checkpoint.manifest import read_manifest
from rlhf_ray.checkpoint.remote import RemoteDirectory
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.checkpoint.uploader import Uploader, fetch_newest
from rlhf_ray.errors import SupersededError
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.ownership import Ownership
from rlhf_ray.observability.run_directory import RunDirectory
from tests.unit.owners import Watch, host, take_over


class Driver:
    """A driver on a machine of its own, that writes its name for weights."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self.term, self.said = name, Watch().claim(directory, host(name)), []
        self.store = CheckpointStore(directory / "checkpoints", 9, self.said.append, self.term)
        self.store.clean()
        start = self.store.latest()
        self.start = start.step if start else None
        Ownership(self.term).go_on_from(self.start)

    def begin(self, step: int) -> Path:
        tmp = self.store.begin(step)
        (tmp / "weights").write_text(self.name)
        return tmp

    def save(self, step: int) -> Path:
        return self.store.commit(self.begin(step), step)

    def export(self, place: Path) -> None:
        with replacing_export(place, 0, "config.json", self.term) as new:
            (new / "config.json").write_text(self.name)


def found(directory: Path) -> dict[str, str]:
    """Whose weights there are, by the names of checkpoints; hidden names too."""
    return {path.name: (path / "weights").read_text() for path in (directory / "checkpoints").iterdir()
            if (path / "weights").is_file()}


def test_the_term_stands_in_temporary_names_and_manifests(tmp_path):
    a = Driver(tmp_path, "a")
    assert a.begin(2).name == ".tmp-step_2-t1"
    a.save(2)
    b = Driver(tmp_path, "b")
    b.save(4)
    assert [read_manifest(CheckpointStore(tmp_path / "checkpoints", 9).latest().path).term, b.start] == [2, 2]
    assert json.loads((tmp_path / "checkpoints/step_2/manifest.json").read_text())["manifest"]["term"] == 1


@pytest.mark.parametrize("late", [
    lambda a: a.save(4), lambda a: a.store.begin(4) and a.store.commit(a.begin(4), 4), lambda a: a.store.clean(),
    lambda a: a.store._prune()], ids=["save", "commit", "clean", "prune"])
def test_a_superseded_driver_changes_no_checkpoint(tmp_path, late):
    a = Driver(tmp_path, "a")
    for step in (1, 2):
        a.save(step)
    a.store.keep = 1
    b = Driver(tmp_path, "b")
    b.save(4)
    under_way = b.begin(6)
    with pytest.raises(SupersededError, match=r"taken over by process 4711 on b \(term 2\)"):
        late(a)
    assert found(tmp_path) == {"step_1": "a", "step_2": "a", "step_4": "b", under_way.name: "b"}


@pytest.mark.parametrize("at", ["before the rename", "when another's is aside"])
@pytest.mark.parametrize("steps_of_b", [[], [4], [4, 6]], ids=["none", "the same step", "a later one too"])
def test_a_commit_that_stood_still_at_its_rename_does_not_take_place(tmp_path, monkeypatch, steps_of_b, at):
    """The worst moments: the check is passed, the rename is not made, or only the one that makes room for it."""
    a = Driver(tmp_path, "a")
    a.save(2)
    if at != "before the rename":
        a.save(4)  # to be replaced
    tmp, rename, drivers = a.begin(4), atomic_directory.os.rename, []

    def stopped(source, target):
        if at == "before the rename" or Path(source) == tmp:
            monkeypatch.setattr(atomic_directory.os, "rename", rename)
            drivers.append(Driver(tmp_path, "b"))
            for step in steps_of_b:
                drivers[0].save(step)
        rename(source, target)

    monkeypatch.setattr(atomic_directory.os, "rename", stopped)
    with pytest.raises(SupersededError):
        a.store.commit(tmp, 4)
    (b,) = drivers
    wanted = {"step_2": "a", **{f"step_{step}": "b" for step in steps_of_b}}
    if at != "before the rename" and not steps_of_b:
        wanted["step_4"] = "a"  # the whole one that was there when b began
    assert {name: of for name, of in found(tmp_path).items() if not name.startswith(".")} == wanted
    b.store.clean()
    assert found(tmp_path) == wanted


def test_a_checkpoint_of_the_successor_that_was_moved_aside_goes_back(tmp_path, monkeypatch):
    """The first driver stops between its look at the name and the rename that makes room there."""
    a = Driver(tmp_path, "a")
    for step in (2, 4):
        a.save(step)
    tmp, check = a.begin(4), Term.check

    def stopped(term):
        check(term)
        if term == a.term:
            monkeypatch.setattr(Term, "check", check)
            Driver(tmp_path, "b").save(4)

    monkeypatch.setattr(Term, "check", stopped)
    with pytest.raises(SupersededError):
        atomic_directory.replace_directory(tmp, a.store.path(4), a.term)
    assert found(tmp_path) == {"step_2": "a", "step_4": "b"}


def test_what_came_late_all_the_same_is_overlooked_and_removed(tmp_path, monkeypatch):
    """A file system that shows the first driver an old state: its checks pass."""
    a = Driver(tmp_path, "a")
    a.save(2)
    b = Driver(tmp_path, "b")
    with monkeypatch.context() as patch:
        patch.setattr(Term, "check", lambda _: None)
        a.save(4)
    assert b.store.latest().step == 2 and b.store.newest_name()[0] == 2
    c = Driver(tmp_path, "c")
    assert c.start == 2 and found(tmp_path) == {"step_2": "a"}
    assert "removing" in c.said[0] and "step_4: a superseded driver wrote it (term 1)" in c.said[0]


def test_what_came_late_is_removed_too_where_a_driver_in_between_died_before_it_chose(tmp_path, monkeypatch):
    a = Driver(tmp_path, "a")
    a.save(2)
    Driver(tmp_path, "b")
    with monkeypatch.context() as patch:
        patch.setattr(Term, "check", lambda _: None)
        a.save(4)
    take_over(tmp_path, "killed")
    assert Driver(tmp_path, "c").start == 2 and found(tmp_path) == {"step_2": "a"}


def test_nothing_of_a_driver_that_began_the_run_anew_is_followed_by_the_one_before(tmp_path, monkeypatch):
    a, b = Driver(tmp_path, "a"), Driver(tmp_path, "b")
    with monkeypatch.context() as patch:
        patch.setattr(Term, "check", lambda _: None)
        a.save(4)
    assert b.start is None and b.store.latest() is None
    b.save(1)
    assert Driver(tmp_path, "c").start == 1


def test_exports_of_a_superseded_driver_do_not_take_place(tmp_path):
    a = Driver(tmp_path, "a")
    a.export(tmp_path / "model")
    b = Driver(tmp_path, "b")
    with pytest.raises(SupersededError):
        a.export(tmp_path / "model")
    b.export(tmp_path / "model")
    with pytest.raises(SupersededError), replacing_export(tmp_path / "best", 0, "config.json", b.term) as new:
        (new / "config.json").touch()
        Driver(tmp_path, "c")
    assert (tmp_path / "model/config.json").read_text() == "b" and not (tmp_path / "best").exists()


def test_copies_elsewhere_are_the_owners(tmp_path):
    run, url = tmp_path / "run", f"file://{tmp_path}/there"
    run.mkdir()
    a = Driver(run, "a")
    a.save(2)
    directory = RunDirectory(run)
    directory.ownership = Ownership(a.term)
    uploader = Uploader(url, directory, silence_s=10, keep=2)
    uploader.start(resume=False)
    a.save(4)
    b = Driver(run, "b")
    there = RemoteDirectory(url, term=b.term)
    there.claim(resume=True)
    there.put_checkpoint(b.save(6))
    (run / "metrics.jsonl").write_text("of b")
    with pytest.raises(SupersededError):
        uploader.finish()
    remote = RemoteDirectory(url)
    assert remote.steps()[0] == 6 and "metrics.jsonl" not in remote.names()
    for write in (lambda: RemoteDirectory(url, term=a.term).remove("checkpoints/step_6"),
                  lambda: RemoteDirectory(url, term=a.term).put_checkpoint(run / "checkpoints/step_6")):
        with pytest.raises(SupersededError):
            write()
    assert remote.steps()[0] == 6


def test_what_was_fetched_from_elsewhere_is_followed_whatever_its_term(tmp_path):
    """The run went on elsewhere, in terms that are numbered from one again, and comes back."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
    for name, step in (("a", 2), ("b", 4), ("c", 6)):
        Driver(here, name).save(step)
    RemoteDirectory(f"file://{tmp_path}/copies").put_checkpoint(Driver(there, "d").save(8))
    term = take_over(here, "e")
    store = CheckpointStore(here / "checkpoints", 9, term=term)
    store.clean()
    assert fetch_newest(f"file://{tmp_path}/copies", here, lambda _: None, term) == 8
    Ownership(term).go_on_from(store.latest().step)
    assert store.latest().step == 8 and read_manifest(store.latest().path).term == 1
