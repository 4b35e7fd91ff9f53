"""Copies of a run elsewhere: what arrives, what is verified, what an upload that fails leaves, and the way back."""

import json
import shutil
import threading
import time
from functools import partial

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rlhf_ray.checkpoint.remote import RemoteDirectory
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.checkpoint.uploader import AGAIN_S, fetch_copy, fetch_newest
from rlhf_ray.errors import CheckpointError, ConfigError, UploadError
from tests.checkpoints import new_checkpoint
from tests.unit.checkpoint.uploads import save, uploader_of, wait_until


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/there"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/there"


def test_a_checkpoint_is_there_while_the_run_goes_on_and_the_rest_when_it_has_ended(run, url, quick):
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    save(run, 1)
    wait_until(lambda: uploader.remote.steps() == [1])
    wait_until(lambda: "metrics.jsonl" in uploader.remote.names())
    assert "ledger.sqlite" not in uploader.remote.names()
    (run / "model").mkdir()
    (run / "model/model.safetensors").write_bytes(b"weights")
    uploader.finish()
    assert {"ledger.sqlite", "model/model.safetensors"} <= set(uploader.remote.names())


def test_what_is_no_longer_kept_here_goes_there_too(run, url, quick):
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    for step in (1, 2, 3):
        save(run, step)
        wait_until(lambda: uploader.step == step)  # noqa: B023
    uploader.finish()
    assert uploader.remote.steps() == [3, 2]


def test_texts_and_metrics_that_were_removed_here_go_there_too(run, url, quick):
    (run / "samples").mkdir()
    files = ["samples/step_000001.parquet", "samples/step_000002.parquet", "metrics-00002.jsonl", "notes.txt"]
    for name in files:
        (run / name).write_text("{}\n")
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    for step in (1, 2):
        save(run, step)
        wait_until(lambda: uploader.step == step and set(files) <= {*uploader.remote.names()})  # noqa: B023
        if step == 1:
            for name in files[1:]:
                (run / name).unlink()
            files = files[:1]
    uploader.finish()
    assert {"samples/step_000001.parquet", "metrics.jsonl", "notes.txt"} <= {*uploader.remote.names()}
    assert not {"samples/step_000002.parquet", "metrics-00002.jsonl"} & {*uploader.remote.names()}


def test_a_run_comes_back_on_another_machine_byte_for_byte(run, url, quick, tmp_path):
    save(run, 4)
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    uploader.finish()
    other = tmp_path / "elsewhere"
    assert fetch_newest(url, other, lambda _: None) == 4
    found = CheckpointStore(other / "checkpoints", 1).latest()
    assert found.step == 4 and (found.path / "policy/rank_0.bin").read_bytes() == b"\x04" * 100_000
    assert (other / "metrics.jsonl").read_text() == "{}\n" and not (other / "ledger.sqlite").exists()
    assert fetch_newest(url, other, lambda _: None) is None, "what is here already is not copied again"


def test_the_owner_of_a_directory_is_not_the_owner_of_its_copies(run, url, quick, tmp_path):
    """A resumed run has a record of its second term, which would end the driver of a copy in its first term."""
    (run / "owner").mkdir()
    (run / "owner/term_2.json").write_text("{}")
    save(run, 4)
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    uploader.finish()
    assert not [name for name in uploader.remote.names() if name.startswith("owner")]
    uploader.remote.put(run / "owner/term_2.json", "owner/term_2.json")  # as other tools copy a directory
    fetch_newest(url, tmp_path / "elsewhere", lambda _: None)
    assert not (tmp_path / "elsewhere/owner").exists()


@pytest.mark.parametrize("lost", ["policy/rank_0.bin", "manifest.json"])
def test_a_fetch_that_is_interrupted_leaves_no_checkpoint_and_is_made_again(run, url, quick, tmp_path, monkeypatch,
                                                                            lost):
    save(run, 4)
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    uploader.finish()
    other, get = tmp_path / "elsewhere", RemoteDirectory.get

    def away(self, name, file):
        if name.endswith(lost):
            raise OSError("the network is away")
        get(self, name, file)

    monkeypatch.setattr(RemoteDirectory, "get", away)
    with pytest.raises(CheckpointError, match=r"fetched from run.upload=.*the network is away.*pass --resume again"):
        fetch_newest(url, other, lambda _: None)
    assert list((other / "checkpoints").iterdir()) == []
    monkeypatch.undo()
    assert fetch_newest(url, other, lambda _: None) == 4
    assert CheckpointStore(other / "checkpoints", 1).latest().step == 4


def damaged_here(run, url, lost):
    """A run with the checkpoints 3 and 4, both uploaded, of which 4 is damaged here; its store, and what it says."""
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    for step in (3, 4):
        save(run, step)
        wait_until(lambda: uploader.step == step)  # noqa: B023
    uploader.finish()
    (run / "checkpoints/step_4" / lost).write_bytes(b"damage")
    said = []
    store = CheckpointStore(run / "checkpoints", 2, said.append,
                            fetch=partial(fetch_copy, url, said.append, None))
    return store, said, uploader.remote


@pytest.mark.parametrize("lost", ["policy/rank_0.bin", "manifest.json"])
def test_a_checkpoint_that_is_damaged_here_and_intact_there_is_fetched_loudly(run, url, quick, lost):
    store, said, _ = damaged_here(run, url, lost)
    found = store.latest()
    assert found.step == 4 and (found.path / "policy/rank_0.bin").read_bytes() == b"\x04" * 100_000
    assert "looking for another copy of a damaged checkpoint" in said[0] and "step_4" in said[0]
    assert said[1] == f"the checkpoint of step 4 was fetched from run.upload={url} in place of the damaged one"
    assert sorted(path.name for path in store.root.iterdir()) == ["step_3", "step_4"]


def test_a_copy_that_is_damaged_too_or_away_is_passed_over_loudly_and_the_one_here_stays(run, url, quick):
    store, said, remote = damaged_here(run, url, "policy/rank_0.bin")
    other = run / "other"
    other.write_bytes(b"damage there")
    remote.put(other, "checkpoints/step_4/policy/rank_0.bin")
    assert store.latest().step == 3
    assert "cannot be fetched from run.upload" in said[1] and "is damaged" in said[1] and "skipping" in said[2]
    assert (store.root / "step_4/policy/rank_0.bin").read_bytes() == b"damage"
    remote.remove("checkpoints/step_4")
    said.clear()
    assert store.latest().step == 3 and "has no complete checkpoint of step 4" in said[1]
    assert sorted(path.name for path in store.root.iterdir()) == ["step_3", "step_4"]


def test_storage_other_than_a_directory_gets_no_option_of_directories():
    class Bucket(MemoryFileSystem):
        protocol = "bucket"

        def __init__(self, use_listings_cache):
            super().__init__(use_listings_cache=use_listings_cache)

    fsspec.register_implementation("bucket", Bucket, clobber=True)
    assert RemoteDirectory("bucket://runs/mine").steps() == []


def test_bytes_that_change_on_the_way_make_no_checkpoint(run, url, quick, monkeypatch):
    def damaging(self, file, name):
        text = file.read_bytes()
        self._fs.pipe_file(self._at(name), text[:-1] + b"!" if name.endswith("rank_0.bin") else text)

    monkeypatch.setattr(RemoteDirectory, "put", damaging)
    save(run, 1)
    with pytest.raises(CheckpointError, match="policy/rank_0.bin differ from the local files"):
        RemoteDirectory(url).put_checkpoint(run / "checkpoints/step_1")
    assert RemoteDirectory(url).steps() == []


def test_a_failure_is_said_and_tried_again_and_the_run_does_not_notice(run, url, quick, monkeypatch):
    broken, put, said = [True], RemoteDirectory.put, []

    def sometimes(self, file, name):
        if broken[0]:
            raise OSError("the network is away")
        put(self, file, name)

    monkeypatch.setattr(RemoteDirectory, "put", sometimes)
    uploader = uploader_of(url, run, warn=said.append)
    uploader.start(resume=False)
    save(run, 1)
    wait_until(lambda: len(said) >= 2)
    assert "the network is away" in said[0] and "tried again" in said[0]
    broken[0] = False
    wait_until(lambda: uploader.remote.steps() == [1])
    uploader.finish()


def test_a_failed_copy_of_the_same_checkpoint_is_not_tried_at_every_look(run, url, quick, monkeypatch):
    monkeypatch.setattr("rlhf_ray.checkpoint.uploader.AGAIN_S", AGAIN_S)
    save(run, 1)
    looks, steps, warnings = [], CheckpointStore.steps, []
    monkeypatch.setattr(CheckpointStore, "steps", lambda self: looks.append(1) or steps(self))
    monkeypatch.setattr(RemoteDirectory, "put", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    uploader = uploader_of(url, run, warn=warnings.append)
    uploader.start(resume=False)
    wait_until(lambda: len(looks) >= 6)
    assert len(warnings) == 1 and "is tried again" in warnings[0]
    save(run, 2)
    wait_until(lambda: len(warnings) == 2)
    with pytest.raises(UploadError, match="it has no checkpoint"):
        uploader.finish()


def test_hidden_files_and_journals_of_episodes_stay_here(run, url, quick):
    (run / ".metrics.jsonl.partial").write_text("half")
    (run / "episodes/1f").mkdir(parents=True)
    (run / "episodes/1f/episode_runner-0-9c.journal").write_text("turns")
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    uploader.finish()
    assert uploader.remote.names() == [".writer.json", "ledger.sqlite", "metrics.jsonl"]


def test_a_run_whose_last_files_are_not_there_says_what_is(run, url, quick, monkeypatch):
    uploader = uploader_of(url, run, warn=lambda _: None)
    uploader.start(resume=False)
    save(run, 1)
    wait_until(lambda: uploader.step == 1)
    monkeypatch.setattr(RemoteDirectory, "put", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    save(run, 2)
    with pytest.raises(UploadError, match=r"OSError: gone.*it has the checkpoint of step 1.*run is complete") as caught:
        uploader.finish()
    assert caught.value.exit_code == 74


def test_the_last_copy_is_tried_more_than_once(run, url, quick, monkeypatch):
    fails, put = [1], RemoteDirectory.put

    def once(self, file, name):
        if name == "metrics.jsonl" and fails and fails.pop():
            raise OSError("a moment")
        put(self, file, name)

    monkeypatch.setattr(RemoteDirectory, "put", once)
    uploader = uploader_of(url, run, warn=lambda _: None)
    uploader.start(resume=False)
    uploader.finish()
    assert not fails and "metrics.jsonl" in uploader.remote.names()


def test_an_upload_that_hangs_does_not_hold_the_end_up_for_ever(run, url, quick, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(RemoteDirectory, "put", lambda *_: hangs.wait(600))
    uploader = uploader_of(url, run, silence_s=0.2, warn=lambda _: None)
    uploader.start(resume=False)
    try:
        with pytest.raises(UploadError, match=r"no progress for 0.2 s"):
            uploader.finish()  # while the upload still hangs: one that is over is no error
    finally:
        hangs.set()


def test_another_run_is_never_written_over(run, url, quick, tmp_path):
    save(run, 7)
    first = uploader_of(url, run)
    first.start(resume=False)
    first.finish()
    with pytest.raises(ConfigError, match=r"step 7.*--resume"):
        uploader_of(url, tmp_path).start(resume=False)


def test_of_two_runs_with_one_url_the_later_has_it_and_the_earlier_says_so(run, url, quick, tmp_path):
    said = []
    earlier = uploader_of(url, run, warn=said.append)
    earlier.start(resume=False)
    other = tmp_path / "other"
    other.mkdir()
    save(other, 4)
    later = uploader_of(url, other)
    later.start(resume=False)
    wait_until(lambda: later.step == 4)
    save(run, 6)
    wait_until(lambda: said)
    assert "taken over by process" in said[0] and "two URLs" in said[0]
    with pytest.raises(UploadError, match="taken over by process"):
        earlier.finish()
    later.finish()
    assert later.remote.steps() == [4] and len(said) == 1


def test_nothing_is_copied_while_it_is_not_known_whose_the_url_is(run, url, quick, monkeypatch):
    said = []
    uploader = uploader_of(url, run, warn=said.append)
    uploader.start(resume=False)
    monkeypatch.setattr(uploader.remote, "read", lambda name: b"{")  # half a writer is another one, too
    save(run, 2)
    wait_until(lambda: said)
    assert "taken over by another driver" in said[0]
    with pytest.raises(UploadError, match="taken over"):
        uploader.finish()
    assert uploader.remote.steps() == []


def test_a_claim_that_cannot_be_read_is_tried_again(run, url, quick, monkeypatch):
    said, read = [], RemoteDirectory.read
    uploader = uploader_of(url, run, warn=said.append)
    uploader.start(resume=False)

    def fails(remote, name):
        if not said:
            raise OSError("no answer")
        return read(remote, name)

    monkeypatch.setattr(RemoteDirectory, "read", fails)
    save(run, 2)
    wait_until(lambda: said)
    assert "no answer" in said[0] and uploader.remote.steps() == []
    uploader.finish()
    assert uploader.remote.steps() == [2]


@pytest.mark.parametrize(("url", "said"), [
    ("s3://key:secret@bucket/run", "contains a password"),
    ("nowhere://x", "cannot be used: .*Give a URL such as s3://"),
    ("file:///proc/nowhere/run", "cannot be written"),
])
def test_a_place_that_cannot_work_is_refused_before_the_run(url, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as caught:
        uploader_of(url, tmp_path).start(resume=False)
    assert "secret" not in str(caught.value)


def test_what_is_removed_while_files_are_sent_is_no_failure(run, url, quick):
    uploader, over, warned = uploader_of(url, run), threading.Event(), []
    uploader._warn = warned.append

    def write_and_remove():
        while not over.is_set():
            (run / "checkpoints/.tmp-step_1-7/policy/rank_0").mkdir(parents=True)
            shutil.rmtree(run / "checkpoints")

    writer = threading.Thread(target=write_and_remove)
    writer.start()
    try:
        for _ in range(300):
            uploader._try(whole=False)
    finally:
        over.set()
        writer.join()
    assert warned == [] and "metrics.jsonl" in uploader.remote.names()


def test_a_disk_that_does_not_answer_for_a_while_does_not_end_the_copying(run, url, quick, monkeypatch):
    uploader, answers = uploader_of(url, run), iter([OSError(116, "Stale file handle")] * 3)

    def stale():
        if (error := next(answers, None)) is not None:
            raise error
        return

    monkeypatch.setattr(uploader._store, "newest_name", stale)
    uploader.start(resume=False)
    time.sleep(0.1)
    uploader.finish()
    assert "ledger.sqlite" in uploader.remote.names()


def mark_best(run, step):
    (run / "best").mkdir(exist_ok=True)
    (run / "best/model.safetensors").write_bytes(f"model of {step}".encode())
    (run / "best.json").write_text(json.dumps({"step": step}))


def test_a_checkpoint_that_is_being_copied_is_not_pruned(run, url, quick, monkeypatch):
    """Copies slower than the training: the one that was begun is finished, and the newest is next."""
    uploader, begun, goes_on, put = uploader_of(url, run), threading.Event(), threading.Event(), RemoteDirectory.put
    store = CheckpointStore(run / "checkpoints", 1, in_use=lambda: uploader._directory.being_uploaded)

    def slow(self, file, name):
        if name.endswith("step_1/policy/rank_0.bin"):
            begun.set()
            assert goes_on.wait(20)
        put(self, file, name)

    monkeypatch.setattr(RemoteDirectory, "put", slow)
    uploader.start(resume=False)
    save(run, 1)
    assert begun.wait(20)
    for step in (2, 3):
        with new_checkpoint(store, step) as place:
            (place / "coordinator.json").write_text(str(step))
    assert [step for step, _ in store.steps()] == [3, 1]
    goes_on.set()
    wait_until(lambda: uploader.step == 3)
    with new_checkpoint(store, 4) as place:
        (place / "coordinator.json").write_text("4")
    assert [step for step, _ in store.steps()] == [4]
    uploader.finish()
    assert uploader.failure is None and uploader.remote.steps()[0] == 4


def test_what_an_interrupted_copy_left_goes(run, url, quick):
    uploader = uploader_of(url, run)
    uploader.remote.put(run / "metrics.jsonl", "checkpoints/step_7/policy/rank_0.bin")
    save(run, 1)
    uploader.start(resume=False)
    uploader.finish()
    assert uploader.remote.begun_steps() == {1}


def test_the_only_copy_of_a_checkpoint_is_not_replaced(run, url, quick, monkeypatch):
    """A resumed run that is stopped before its first step saves the same step again."""
    save(run, 4)
    first = uploader_of(url, run)
    first.start(resume=False)
    first.finish()
    copy = first.remote.read("checkpoints/step_4/manifest.json")
    save(run, 4)
    manifest = run / "checkpoints/step_4/manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    removed = []
    monkeypatch.setattr(RemoteDirectory, "remove", lambda self, name: removed.append(name))
    again = uploader_of(url, run)
    again.start(resume=True)
    again.finish()
    assert again.remote.read("checkpoints/step_4/manifest.json") == copy
    assert not [name for name in removed if "step_4" in name]


def test_the_best_checkpoint_comes_along_to_another_machine_and_stays_there(run, url, quick, tmp_path):
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    store = CheckpointStore(run / "checkpoints", 2)
    store.protect({1})
    for step in (1, 2, 3, 4):
        with new_checkpoint(store, step) as place:
            (place / "coordinator.json").write_text(str(step))
        mark_best(run, 1)
        wait_until(lambda: uploader.step == step)  # noqa: B023
    uploader.finish()
    assert uploader.remote.steps() == [4, 3, 1]
    other = tmp_path / "elsewhere"
    assert fetch_newest(url, other, lambda _: None) == 4
    assert [step for step, _ in CheckpointStore(other / "checkpoints", 2).steps()] == [4, 1]
    there = uploader_of(url, other)
    there.start(resume=True)
    there.finish()
    assert there.remote.steps() == [4, 3, 1], "until two newer ones are here, step 3 is one to fall back on"
    store = CheckpointStore(other / "checkpoints", 2)
    store.protect({1})
    with new_checkpoint(store, 5) as place:
        (place / "coordinator.json").write_text("5")
    there = uploader_of(url, other)
    there.start(resume=True)
    there.finish()
    assert there.remote.steps() == [5, 4, 1]


def test_all_kept_checkpoints_are_copied_not_only_the_newest(run, url, quick):
    for step in (1, 2):
        save(run, step)
    uploader = uploader_of(url, run)
    uploader.start(resume=False)
    uploader.finish()
    assert uploader.remote.steps() == [2, 1]


def test_an_older_checkpoint_that_is_damaged_holds_up_nothing(run, url, quick):
    for step in (1, 2):
        save(run, step)
    (run / "checkpoints/step_1/policy/rank_0.bin").write_bytes(b"damage")
    said = []
    uploader = uploader_of(url, run, warn=said.append)
    uploader.start(resume=False)
    uploader.finish()
    assert uploader.remote.steps() == [2]
    assert [text for text in said if "the checkpoint of step 1 is not copied" in text] == said


@pytest.mark.parametrize("lost", ["best/model.safetensors", "best.json"])
def test_best_json_is_there_only_with_its_model(run, url, quick, monkeypatch, lost):
    mark_best(run, 1)
    uploader = uploader_of(url, run, warn=lambda _: None)
    uploader._try(whole=False)
    mark_best(run, 20)
    put = RemoteDirectory.put

    def away(self, file, name):
        if name == lost:
            raise OSError("the network is away")
        put(self, file, name)

    monkeypatch.setattr(RemoteDirectory, "put", away)
    uploader._try(whole=False)
    assert uploader.failure and uploader.remote.read("best.json") is None
    monkeypatch.undo()
    uploader._try(whole=False)
    assert json.loads(uploader.remote.read("best.json")) == {"step": 20}
    assert uploader.remote.read("best/model.safetensors") == b"model of 20"


def test_rows_of_metrics_are_there_before_their_checkpoint(run, url, quick, monkeypatch):
    names, put = [], RemoteDirectory.put
    monkeypatch.setattr(RemoteDirectory, "put", lambda self, file, name: names.append(name) or put(self, file, name))
    save(run, 1)
    uploader_of(url, run)._try(whole=False)
    assert names[0] == "metrics.jsonl" and names[-1] == "checkpoints/step_1/manifest.json"


def test_a_file_that_cannot_be_read_holds_up_no_checkpoint(run, url, quick, monkeypatch):
    put = RemoteDirectory.put

    def refused(self, file, name):
        if name == "metrics.jsonl":
            raise PermissionError(13, "Permission denied")
        put(self, file, name)

    monkeypatch.setattr(RemoteDirectory, "put", refused)
    save(run, 1)
    uploader = uploader_of(url, run, warn=lambda _: None)
    uploader._try(whole=False)
    assert uploader.remote.steps() == [1] and "Permission denied" in uploader.failure


def test_a_newest_checkpoint_that_vanishes_costs_no_older_copy(run, url, quick, monkeypatch):
    uploader, put = uploader_of(url, run, keep=1), RemoteDirectory.put_checkpoint
    save(run, 1)
    uploader._try(whole=False)
    save(run, 2, keep=1)
    monkeypatch.setattr(RemoteDirectory, "put_checkpoint", lambda self, path: shutil.rmtree(path) or put(self, path))
    uploader._try(whole=False)
    assert uploader.remote.steps() == [1] and uploader.step == 1 and uploader.failure is None


def test_bytes_that_change_on_the_way_are_tried_again_also_of_an_older_checkpoint(run, url, quick, monkeypatch):
    for step in (1, 2):
        save(run, step)
    put, wrong = RemoteDirectory.put, [True]

    def damaging(self, file, name):
        put(self, file, name)
        if name.endswith("step_1/policy/rank_0.bin") and wrong:
            wrong.clear()
            self._fs.pipe_file(self._at(name), b"damage")

    monkeypatch.setattr(RemoteDirectory, "put", damaging)
    uploader = uploader_of(url, run, warn=lambda _: None)
    uploader._try(whole=False)
    assert uploader.failure and uploader.remote.steps() == [2]
    uploader._try(whole=False)
    assert uploader.failure is None and uploader.remote.steps() == [2, 1]


def test_a_model_that_is_replaced_while_it_is_copied_is_not_named(run, url, quick, monkeypatch):
    mark_best(run, 1)
    put = RemoteDirectory.put

    def replaced(self, file, name):
        put(self, file, name)
        if name == "best/model.safetensors" and (run / "best.json").read_text() == '{"step": 1}':
            (run / "best/model.safetensors").write_bytes(b"model of twenty")

    monkeypatch.setattr(RemoteDirectory, "put", replaced)
    uploader = uploader_of(url, run)
    uploader._try(whole=False)
    assert uploader.remote.read("best.json") is None
