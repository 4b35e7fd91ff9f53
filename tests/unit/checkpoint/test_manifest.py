"""A manifest notices every change of a checkpoint, and says which file and what."""

import json

import pytest

from rlhf_ray.checkpoint.manifest import (
    MANIFEST_NAME,
    SCHEMA,
    NewerSchemaError,
    verify_manifest,
    write_manifest,
)
from rlhf_ray.errors import CheckpointError

FILES = {"state.json": b'{"step": 3}', "policy/rank_0.pt": bytes(range(256)) * 40, "empty.txt": b""}


@pytest.fixture
def checkpoint(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, step=3, term=2)
    return tmp_path


def test_an_untouched_checkpoint_verifies(checkpoint):
    manifest = verify_manifest(checkpoint)
    assert manifest.step == 3 and manifest.term == 2 and manifest.schema == SCHEMA
    assert {name: record.size for name, record in manifest.files.items()} == {name: len(x) for name, x in FILES.items()}
    assert manifest.package_version and manifest.created.endswith("+00:00")
    # SHA-256 of nothing, from the standard.
    assert manifest.files["empty.txt"].sha256.startswith("e3b0c44298fc1c14")


@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME])
def test_a_deleted_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} (is missing|cannot be read)"):
        verify_manifest(checkpoint)


@pytest.mark.parametrize("name", ["state.json", "policy/rank_0.pt", MANIFEST_NAME])
def test_a_truncated_file_is_named(checkpoint, name):
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match=rf"{name} is (truncated|damaged)"):
        verify_manifest(checkpoint)


@pytest.mark.parametrize("name", ["state.json", "policy/rank_0.pt"])
def test_a_flipped_byte_is_named(checkpoint, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} has changed: SHA-256"):
        verify_manifest(checkpoint)


def test_any_flipped_byte_of_the_manifest_itself_is_noticed(checkpoint):
    path = checkpoint / MANIFEST_NAME
    intact = path.read_bytes()
    for position in range(len(intact)):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        with pytest.raises(CheckpointError, match=MANIFEST_NAME):
            verify_manifest(checkpoint)


@pytest.mark.parametrize("name", ["evil.pt", "policy/mp_rank_01_model_states.pt", ".hidden.pkl", "latest"])
def test_an_unlisted_file_is_refused(checkpoint, name):
    (checkpoint / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{name} is not listed"):
        verify_manifest(checkpoint)


def test_a_file_systems_hidden_leftover_is_overlooked(checkpoint):
    (checkpoint / ".nfs000012").write_bytes(b"x")
    verify_manifest(checkpoint)


def test_a_longer_file_is_named(checkpoint):
    with (checkpoint / "state.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match=r"state\.json is longer than written: 12 bytes instead of 11"):
        verify_manifest(checkpoint)


def test_a_link_in_place_of_a_file_is_refused(checkpoint, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "state.json"
    (checkpoint / "state.json").rename(elsewhere)
    (checkpoint / "state.json").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"state\.json is not a regular file"):
        verify_manifest(checkpoint)


def test_a_link_to_a_directory_is_refused(checkpoint, tmp_path_factory):
    (checkpoint / "more").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(CheckpointError, match="more is not listed"):
        verify_manifest(checkpoint)


def test_writing_refuses_links(tmp_path):
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="link is not a regular file"):
        write_manifest(tmp_path, step=0)


def test_a_newer_schema_is_refused_as_such(checkpoint):
    path = checkpoint / MANIFEST_NAME
    document = json.loads(path.read_text())
    document["manifest"]["schema"] = SCHEMA + 1
    path.write_text(json.dumps(document))
    with pytest.raises(NewerSchemaError, match=f"schema {SCHEMA + 1}.*update the package"):
        verify_manifest(checkpoint)


def test_a_path_that_leaves_the_checkpoint_is_refused(checkpoint, monkeypatch):
    from rlhf_ray.checkpoint import manifest as module

    manifest = module.read_manifest(checkpoint)
    outside = module.Manifest(**{**manifest.__dict__, "files": {"../x.pt": module.FileRecord(1, "0")}})
    (checkpoint / MANIFEST_NAME).write_bytes(module._encode(outside))
    (checkpoint.parent / "x.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"\.\./x\.pt points outside"):
        verify_manifest(checkpoint)
