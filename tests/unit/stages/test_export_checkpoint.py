"""`rlhf-ray export` of checkpoints that the test writes itself, tensor by tensor; learners' own checkpoints are in
tests/cluster/learners/test_saved_export.py."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_ray.checkpoint import manifest
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.stages import PPOConfig, SFTConfig
from rlhf_ray.errors import CheckpointError, ConfigError, ModelError
from rlhf_ray.models.loading import check_model_directory
from rlhf_ray.observability.owner_record import ProcessIdentity
from rlhf_ray.observability.ownership import Ownership, claim
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.export_checkpoint import export_checkpoint
from rlhf_ray.stages.resolve_model import model_at
from tests.blocked_packages import without
from tests.checkpoints import new_checkpoint
from tests.hub_server import hub_server
from tests.models import make_tiny_llama

RANKS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "base", vocab=64, hidden=32, tied=False)


def trained(base, step):
    """Weights by name that a run might have after so many steps."""
    return {name: weight + 0.125 * step for name, weight in load_file(base / "model.safetensors").items()}


def write_learner(directory, weights):
    """The files of three ranks: each has a third of every flattened parameter."""
    directory.mkdir()
    for rank in range(RANKS):
        shards = {}
        for name, weight in weights.items():
            size = -(-weight.numel() // RANKS)
            if len(part := weight.flatten()[rank * size : (rank + 1) * size]):
                shards[f"weights:{rank * size}:model.{name}"] = part.clone()
        notes = {"world": RANKS, "optimizer_steps": 1, "consecutive_skipped_updates": 0, "steps": {}}
        save_file(shards, directory / f"rank_{rank}.safetensors", metadata={"notes": json.dumps(notes)})


@pytest.fixture
def run(base, tmp_path):
    """A run with checkpoints of steps 2 and 4."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    config = PPOConfig(model={"path": str(base), "dtype": "bfloat16"}, rewards={"r": {"type": "number"}},
                       prompts={"path": "p"}, run={"dir": str(run.path), "steps": 9})
    run.config.write_text(as_yaml(config))
    store = CheckpointStore(run.checkpoints, keep=5)
    for step in (2, 4):
        with new_checkpoint(store, step) as directory:
            write_learner(directory / "policy_learner", trained(base, step))
    return run


def assert_is(directory, base, step):
    """transformers loads the weights of this step, rounded to bfloat16, from the directory."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    for name, weight in trained(base, step).items():
        assert torch.equal(loaded[name], weight.bfloat16()), name


def test_the_newest_checkpoint_is_a_model_that_transformers_loads(run, base, capsys):
    exported = export_checkpoint(run.path)
    assert (exported.step, exported.steps, exported.files) == (4, 9, {"model": run.path / "export" / "step_4"})
    assert_is(exported.files["model"], base, 4)
    assert "4 updates" in (exported.files["model"] / "README.md").read_text()
    assert capsys.readouterr().out == f"step 4 of 9, from {run.checkpoints}/step_4\n"


@pytest.mark.parametrize("chosen", ["step", "checkpoint", "best"])
def test_a_step_may_be_named(chosen, run, base, tmp_path):
    run.best_mark.write_text('{"step": 2}')
    output = tmp_path / "models" / "mine"
    if chosen == "checkpoint":
        exported = export_checkpoint(run.checkpoints / "step_2", output=output)
    else:
        exported = export_checkpoint(run.path, 2 if chosen == "step" else "best", output)
    assert exported.step == 2 and exported.files == {"model": output}
    assert_is(output, base, 2)
    assert not run.exports.exists()


def test_the_card_has_the_evaluation_of_the_step_and_the_method(run):
    rows = [{"step": 2, "eval/reward": 0.25}, {"step": 3, "reward/mean": 1.0}, {"step": 5, "eval/reward": 0.75}]
    run.metrics.write_text("".join(json.dumps({"time": 0, **row}) + "\n" for row in rows))
    run.write_json("evaluation.json", {"step": 5, "before": {"reward": 0}, "after": {"reward": 0.75}, "texts": []})
    card = (export_checkpoint(run.path).files["model"] / "README.md").read_text()
    assert "| reward | 0.25 |" in card and "Trained by PPO with" in card


def test_neither_ray_nor_vllm_nor_deepspeed_is_needed(run, base, tmp_path):
    environment = without(tmp_path / "hidden", "ray", "vllm", "deepspeed")
    done = subprocess.run([sys.executable, "-m", "rlhf_ray.cli.main", "export", str(run.path), "--step", "2"],
                          env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"model: {run.path}/export/step_2"
    assert_is(run.path / "export" / "step_2", base, 2)


def test_a_damaged_checkpoint_is_not_loaded(run, base):
    file = run.checkpoints / "step_4" / "policy_learner" / "rank_1.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))
    with pytest.raises(CheckpointError, match="step_4 is damaged: policy_learner/rank_1.safetensors has changed"):
        export_checkpoint(run.path, 4)
    said = []
    assert export_checkpoint(run.path, say=said.append).step == 2, "the newest intact one"
    assert said[0].startswith("skipping a damaged checkpoint")
    assert not (run.path / "export" / "step_4").exists()


def test_what_is_missing_is_named(run, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has those of 2, 4"):
        export_checkpoint(run.path, 3)
    with pytest.raises(ConfigError, match="has no best step"):
        export_checkpoint(run.path, "best")
    with pytest.raises(ConfigError, match="one step already; leave --step 4 out"):
        export_checkpoint(run.checkpoints / "step_2", 4)
    with pytest.raises(CheckpointError, match=r"holds no run; name .*, such as .*/run"):
        export_checkpoint(tmp_path)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="has no checkpoint. A run writes one every checkpoint.every steps"):
        export_checkpoint(run.path)


def test_an_output_that_exists_is_never_replaced(run, base):
    before = {file: file.read_bytes() for file in base.iterdir()}
    with pytest.raises(ConfigError, match="exists, and is not an empty directory"):
        export_checkpoint(run.path, output=base)
    assert {file: file.read_bytes() for file in base.iterdir()} == before


def test_an_output_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/model cannot be written: .*; name another"):
        export_checkpoint(run.path, output=tmp_path / "file" / "model")


def test_the_usual_place_is_written_again(run, base):
    first = export_checkpoint(run.path, 2).files["model"]
    (first / "model.safetensors").unlink()
    assert_is(export_checkpoint(run.path, 2).files["model"], base, 2)


def test_a_run_of_another_driver_is_only_read(run, base):
    """Also where a driver, which is alive, has gone on from step 2, and a superseded one has written step 4."""
    term = claim(run.path, ProcessIdentity.own(), print)
    Ownership(term).go_on_from(2)
    file = run.checkpoints / "step_4" / "manifest.json"
    file.write_bytes(manifest._encode(replace(manifest.read_manifest(file.parent), term=term.number + 7)))
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*") if file.is_file()}
    assert export_checkpoint(run.path).step == 2
    after = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")
             if file.is_file() and run.exports not in file.parents}
    assert after == before
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; it has those of 2"):
        export_checkpoint(run.path, 4)


def test_a_checkpoint_of_another_model_is_refused(run, base):
    with new_checkpoint(CheckpointStore(run.checkpoints, keep=9), 6) as directory:
        weights = trained(base, 6)
        weights.pop("model.norm.weight")
        write_learner(directory / "policy_learner", weights)
    with pytest.raises(CheckpointError, match=r"\['model.model.norm.weight'\] are in only one of the two"):
        export_checkpoint(run.path)
    assert not run.exports.exists()


def test_a_base_model_that_has_gone_is_named(run, base):
    config = run.config.read_text().replace(str(base), "runs/x/gone")
    run.config.write_text(config)
    with pytest.raises(ModelError, match=r"model.path='runs/x/gone': no such directory"):
        export_checkpoint(run.path)


def test_variables_of_the_environment_do_not_change_what_a_run_was(run, base, monkeypatch):
    monkeypatch.setenv("RLHF_RAY_MODEL__PATH", "another/model")
    assert_is(export_checkpoint(run.path).files["model"], base, 4)


def test_a_model_that_is_made_anew_needs_no_base(base, tmp_path):
    from transformers import AutoModelForCausalLM

    shape = {"hidden_size": 32, "layers": 2, "heads": 1}
    config = SFTConfig(model={"architecture": shape, "tokenizer": str(base)}, data={"path": "d"})
    learned = {name: weight.fill_(0.5) for name, weight in
               AutoModelForCausalLM.from_config(_made(config)).state_dict().items() if name != "lm_head.weight"}
    run = RunDirectory(tmp_path / "sft")
    with new_checkpoint(CheckpointStore(run.checkpoints, keep=1), 1) as directory:
        write_learner(directory / "sft_learner", learned)
    run.config.write_text(as_yaml(config))
    model = AutoModelForCausalLM.from_pretrained(export_checkpoint(run.path).files["model"])
    assert all(torch.equal(parameter, torch.full_like(parameter, 0.5)) for parameter in model.parameters())


def _made(config):
    from rlhf_ray.models.loading import new_config

    return new_config(config.model)


def test_generate_uses_the_newest_export_of_a_run_and_says_so(run):
    advice = rf"is the directory of a run with checkpoints, .*`rlhf-ray export {run.path}`"
    with pytest.raises(ModelError, match=advice):
        model_at(str(run.path))
    with pytest.raises(ModelError, match="is a checkpoint of a run, .*`rlhf-ray export "):
        model_at(str(run.checkpoints / "step_2"))
    for step in (2, 4):
        export_checkpoint(run.path, step)
    config, notice = model_at(str(run.path))
    assert config.path == str(run.path / "export" / "step_4")
    assert notice == f"{run.path} is a run without a model/; using its export, {run.path}/export/step_4"


def test_a_directory_that_is_no_model_and_no_run_has_no_such_advice(tmp_path):
    from rlhf_ray.config.model import ModelConfig

    with pytest.raises(ModelError, match="has no config.json.*Name the directory of one"):
        check_model_directory(ModelConfig(path=str(tmp_path)), "model")


def test_the_command_uploads_what_it_exported(run, tmp_path):
    from typer.testing import CliRunner

    from rlhf_ray.cli.main import app

    out = tmp_path / "out"
    with hub_server() as server:
        result = CliRunner().invoke(app, ["export", str(run.path), "--output", str(out), "--push-to-hub=me/mine"])
        assert result.exit_code == 0 and f"on the Hub: {server.url}/me/mine\n" in result.output
        [[header, *files]] = server.commits
    assert header["value"]["summary"].startswith("rlhf-ray export, step 4 of 9")
    sent = {each["value"]["path"] for each in files}
    assert sent == {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} >= {"model.safetensors"}
    assert 'from_pretrained("me/mine")' in (out / "README.md").read_text()


@pytest.mark.parametrize(("given", "answer"), [("2", 0), ("best", 2), ("last", 2), ("-1", 2)])
def test_the_command_takes_a_number_or_best(given, answer, run, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from rlhf_ray.cli.main import app

    result = CliRunner().invoke(app, ["export", str(run.path), f"--step={given}", "--output", str(tmp_path / "out")])
    assert getattr(result.exception, "exit_code", result.exit_code) == answer
    if answer:
        assert "has no best step" in str(result.exception) or f"--step={given}" in str(result.exception)
