"""Which node must see which files, and what is said of one that does not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_ray.cluster import shared_files
from rlhf_ray.config.derived import model_paths, placements_of
from rlhf_ray.config.run import PoolConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ClusterError
from rlhf_ray.planning.bundle_packing import Node

NODES = {"gen": {"g1", "g2"}, "learn": {"l"}, "score": {"s", "l"}}


@pytest.fixture
def config(tmp_path):
    """A run whose policy and reward model are directories, in a directory that is there."""
    for name in ("policy", "reward", "run"):
        (tmp_path / name).mkdir()
    return PPOConfig(
        run={"dir": str(tmp_path / "run")}, model={"path": str(tmp_path / "policy")}, prompts={"path": "p"},
        rewards={"main": {"type": "model", "path": str(tmp_path / "reward")},
                 "hub": {"type": "model", "path": "somebody/from-the-hub"}},
        pools={name: PoolConfig(cpus=4) for name in NODES}, generator={"pool": "gen"}, policy={"pool": "learn"},
        critic={"pool": "learn"}, assembler={"pool": "learn"}, reference={"pool": "score"}, reward={"pool": "score"})


def test_each_node_is_asked_for_what_its_roles_read_and_write(config, tmp_path, monkeypatch):
    asked = {}

    async def require(wanted):
        asked.update(wanted)
        (mark,) = [path for path in wanted["l"] if "seen-from" in path]
        assert Path(mark).parent == tmp_path / "run" and Path(mark).exists()

    monkeypatch.setattr(shared_files, "require_files", require)
    roles = placements_of(config)
    models = {role: model_paths(config, role) for role in roles}
    asyncio.run(shared_files.require_shared_files(
        tmp_path / "run", roles, models, {"policy", "critic", "assembler"},
        SimpleNamespace(nodes_of=NODES.__getitem__)))
    named = {node: {Path(path).name.split("-")[0] for path in paths} for node, paths in asked.items()}
    assert named == {"g1": {"policy"}, "g2": {"policy"}, "s": {"policy", "reward"}, "l": {"policy", "reward", ".seen"}}
    assert list((tmp_path / "run").iterdir()) == [], "the mark is gone"


def test_a_node_that_does_not_see_a_file_is_named_with_it(monkeypatch):
    async def asked(node, paths):
        return [path for path in paths if node == "far" and path != "/shared/run"]

    monkeypatch.setattr(shared_files, "_absent_on", asked)
    monkeypatch.setattr(shared_files, "present_nodes", lambda: [Node("10.0.0.7 (far)", {}, id="far")])
    monkeypatch.setattr(shared_files.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    with pytest.raises(ClusterError) as refused:
        asyncio.run(shared_files.require_files(
            {"here": ["/a"], "near": ["/a"], "far": ["/a", "/shared/run"], "idle": []}))
    assert "  10.0.0.7 (far): /a\n" in str(refused.value) and "/shared/run" not in str(refused.value)
    asyncio.run(shared_files.require_files({"here": ["/a"], "near": ["/a"]}))


def test_what_is_absent_is_told(tmp_path):
    (tmp_path / "here").touch()
    assert shared_files._absent([str(tmp_path / "here"), str(tmp_path / "there")]) == [str(tmp_path / "there")]
