"""Checkpoints appear whole or not at all, are found again, and make room."""

import os

import pytest

from rlhf_ray.checkpoint.manifest import MANIFEST_NAME, SCHEMA, NewerSchemaError, verify_manifest
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.errors import CheckpointError
from tests.checkpoints import new_checkpoint


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def store(tmp_path, warnings):
    return CheckpointStore(tmp_path / "checkpoints", keep=2, warn=warnings.append)


def save(store, step):
    tmp = store.begin(step)
    (tmp / "policy").mkdir()
    (tmp / "policy" / "rank_0.pt").write_bytes(f"weights of {step}".encode() * 100)
    return store.commit(tmp, step)


def damage(path):
    (path / "policy" / "rank_0.pt").write_bytes(b"0")


def names(store):
    return sorted(path.name for path in store.root.iterdir())


def test_a_run_without_checkpoints_has_no_latest(store):
    assert store.latest() is None


def test_commit_makes_a_verified_checkpoint_that_latest_finds(store):
    path = save(store, 3)
    assert path == store.root / "step_3" and names(store) == ["step_3"]
    assert store.latest() == (3, path)
    assert verify_manifest(path).step == 3


def test_latest_goes_by_number_and_not_by_name(store):
    save(store, 9)
    save(store, 10)
    assert store.latest()[0] == 10


def test_nothing_is_visible_before_commit_and_the_previous_stays(store):
    save(store, 1)
    tmp = store.begin(2)
    (tmp / "half").write_bytes(b"x")
    assert store.latest()[0] == 1
    assert tmp.name == f".tmp-step_2-{os.getpid()}" and tmp.parent == store.root


def test_clean_removes_leftovers_and_nothing_else(store):
    save(store, 1)
    tmp = store.begin(2)
    (tmp / "half").write_bytes(b"x")
    other = store.root / ".tmp-step_7-99999"
    other.mkdir()
    deleted = store.root / ".del-step_0-1"
    deleted.mkdir()
    (store.root / ".tmp-mine").mkdir()
    outside = store.root.parent / "outside"
    outside.mkdir()
    (store.root / ".tmp-step_8-1").symlink_to(outside)
    assert store.clean() == sorted([tmp, other, deleted])
    assert names(store) == [".tmp-mine", ".tmp-step_8-1", "step_1"] and outside.is_dir()


def test_begin_starts_empty_over_a_leftover_of_its_own(store):
    (store.begin(1) / "half").write_bytes(b"x")
    assert list(store.begin(1).iterdir()) == []


def test_saving_a_step_again_replaces_it(store):
    save(store, 4)
    tmp = store.begin(4)
    (tmp / "new").write_bytes(b"second")
    store.commit(tmp, 4)
    assert names(store) == ["step_4"] and set(verify_manifest(store.root / "step_4").files) == {"new"}


def test_an_interrupted_replacement_is_put_back(store):
    path = save(store, 4)
    path.rename(store.root / ".old-step_4-123")
    assert store.clean() == []
    assert store.latest()[0] == 4


def test_a_replaced_checkpoint_left_behind_is_removed(store):
    save(store, 4)
    (store.root / ".old-step_4-123").mkdir()
    assert [path.name for path in store.clean()] == [".old-step_4-123"]
    assert names(store) == ["step_4"]


def test_latest_passes_over_a_damaged_checkpoint_loudly(store, warnings):
    save(store, 1)
    damage(save(store, 2))
    assert store.latest()[0] == 1
    assert len(warnings) == 1 and "step_2" in warnings[0] and "rank_0.pt is truncated" in warnings[0]


def test_latest_passes_over_one_without_a_manifest(store, warnings):
    save(store, 1)
    (save(store, 2) / MANIFEST_NAME).unlink()
    assert store.latest()[0] == 1 and "cannot be read" in warnings[0]


def test_latest_never_starts_afresh_over_damaged_checkpoints(store, warnings):
    damage(save(store, 1))
    damage(save(store, 2))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        store.latest()
    assert "step_1" in str(caught.value) and "step_2" in str(caught.value) and len(warnings) == 2


def test_latest_refuses_a_newer_schema_instead_of_falling_back(store):
    save(store, 1)
    path = save(store, 2) / MANIFEST_NAME
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}'))
    with pytest.raises(NewerSchemaError):
        store.latest()


def test_latest_notices_a_renamed_checkpoint(store, warnings):
    save(store, 1)
    save(store, 2).rename(store.root / "step_5")
    assert store.latest()[0] == 1 and "holds step 2" in warnings[0]


def test_pruning_keeps_the_newest(store):
    for step in (8, 9, 10, 11):
        save(store, step)
    assert names(store) == ["step_10", "step_11"]


def test_pruning_leaves_what_is_not_ours(store):
    for name in ("step_1", "step_x", "notes"):
        (store.root / name).mkdir(parents=True)
    for step in (2, 3, 4):
        save(store, step)
    assert names(store) == ["notes", "step_1", "step_3", "step_4", "step_x"]


def test_pruning_never_follows_a_link(store, tmp_path):
    elsewhere = CheckpointStore(tmp_path / "elsewhere", keep=1)
    target = save(elsewhere, 1)
    store.root.mkdir()
    (store.root / "step_1").symlink_to(target)
    for step in (2, 3, 4):
        save(store, step)
    assert names(store) == ["step_1", "step_3", "step_4"]
    assert verify_manifest(target).step == 1


def test_a_link_inside_a_pruned_checkpoint_is_not_followed(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    (save(store, 1) / "link").symlink_to(outside)
    save(store, 2)
    save(store, 3)
    assert names(store) == ["step_2", "step_3"] and (outside / "precious").exists()


@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_an_old_checkpoint_that_cannot_be_removed_is_told_of_and_tried_again(store, warnings, monkeypatch, call):
    for step in (1, 2):
        save(store, step)
    real = getattr(os, call)

    def refused(path, *args, **options):
        if "step_1" in str(path) or options.get("dir_fd") is not None:
            raise PermissionError(1, "Operation not permitted", str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        save(store, 3)
        assert len(warnings) == 1 and "the old checkpoint" in warnings[0] and "step_1" in warnings[0]
        save(store, 4)
        assert len(warnings) > 1 and "cannot be removed" in warnings[1]
        assert store.latest().step == 4
    save(store, 5)
    assert names(store) == ["step_4", "step_5"]
    assert not [path for path in store.root.iterdir() if path.name.startswith(".")]


def test_damaged_checkpoints_do_not_push_out_intact_ones(store):
    save(store, 1)
    damage(save(store, 2))
    assert store.latest()[0] == 1
    save(store, 3)
    assert names(store) == ["step_1", "step_2", "step_3"]
    save(store, 4)
    assert names(store) == ["step_3", "step_4"]


def test_an_error_while_a_checkpoint_is_written_leaves_nothing_of_it(store):
    with new_checkpoint(store, 1) as tmp:
        (tmp / "file").write_bytes(b"x")
    with pytest.raises(KeyError), new_checkpoint(store, 2) as tmp:
        (tmp / "file").write_bytes(b"x")
        raise KeyError("a worker failed")
    assert names(store) == ["step_1"]


def test_a_failed_commit_leaves_the_previous_checkpoint_alone(store):
    save(store, 1)
    tmp = store.begin(2)
    (tmp / "link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="not a regular file"):
        store.commit(tmp, 2)
    assert names(store) == ["step_1"] and store.latest()[0] == 1


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep at least one"):
        CheckpointStore(tmp_path, keep=0)


def test_a_protected_checkpoint_is_never_pruned_and_not_counted(store):
    for step in (1, 2):
        save(store, step)
    store.protect([1])
    for step in (3, 4):
        save(store, step)
    assert names(store) == ["step_1", "step_3", "step_4"]
    store.protect([3])
    save(store, 5)
    assert names(store) == ["step_3", "step_4", "step_5"], "what is protected no more goes"
