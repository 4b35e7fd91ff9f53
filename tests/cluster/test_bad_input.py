"""What cannot work, through the command line: one clear message that names the fix, an exit code, and nothing left."""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cli.main import main
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL, VOCAB
from tests.cluster.processes import descendants
from tests.models import make_tiny_llama, make_tiny_reward_model

pytestmark = pytest.mark.cluster
REFUSED, FAILED = 2, 1
LEAN = {**SMALL, "critic": None, "algorithm": {"estimator": "reinforce", "kl": {"coef": 0.1}}}
"""A run of few workers: without a critic."""
FIRST_SIGN_S = 20
"""Refusals come before Ray starts: well within this even on a busy machine."""


@pytest.fixture
def command_line(monkeypatch, capfd):
    """command_line("ppo", file) -> code, out, err and seconds of the command, run in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlhf-ray", *map(str, arguments)])
        code, began = 0, time.monotonic()
        capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, seconds=time.monotonic() - began)

    return run


@pytest.fixture
def refused(command_line, configure, tmp_path, monkeypatch):
    """refused(run sections, overrides...) -> the message of a command that stopped before it joined or started Ray."""
    joined = []
    monkeypatch.setattr("rlhf_ray.stages.runtime.ray_session", lambda *_: joined.append(1) or nullcontext())

    def run(*overrides, **sections):
        outcome = command_line("ppo", configure(tmp_path / "run", **sections), *overrides)
        assert outcome.code == REFUSED, outcome.err
        assert outcome.err.startswith("error: ") and "Traceback" not in outcome.err
        assert not joined and outcome.seconds < FIRST_SIGN_S
        assert not (tmp_path / "run/metrics.jsonl").exists()
        return outcome.err

    return run


# Refused before Ray starts


def test_a_model_directory_that_is_not_there(refused, tmp_path):
    message = refused(model={"path": str(tmp_path / "nowhere")})
    assert "model.path" in message and str(tmp_path / "nowhere") in message and "no such directory" in message


def test_a_model_directory_without_weights(refused, files, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text((files.policy / "config.json").read_text())
    assert "no *.safetensors file" in refused(model={"path": str(tmp_path / "half")})


def test_prompts_that_are_not_there_or_empty(refused, tmp_path):
    assert "prompts.path" in refused(prompts={"path": str(tmp_path / "none.jsonl")})
    (tmp_path / "empty.jsonl").touch()
    assert "is empty" in refused(prompts={"path": str(tmp_path / "empty.jsonl")})


def test_a_critic_from_a_reward_model_of_another_vocabulary(refused, tmp_path):
    other = make_tiny_reward_model(tmp_path / "other", 48)
    message = refused("--critic.init=reward", rewards={"main": {"type": "model", "path": str(other)}})
    assert "different tokenizers" in message and str(other) in message


@pytest.mark.parametrize("section", ["reference", "critic"])
def test_a_reference_or_critic_that_cannot_read_the_policy_s_tokens(refused, tmp_path, section):
    other = make_tiny_llama(tmp_path / "other", 48, hidden=32, heads=1)
    message = refused(f"--{section}.path={other}")
    assert f"{section}.path ('{other}') have different tokenizers" in message and f"Leave {section}.path" in message
    message = refused(f"--{section}.path={tmp_path}/nowhere")
    assert f"{section}.path='{tmp_path}/nowhere': no such directory" in message


@pytest.fixture
def encoder(files, tmp_path):
    """encoder(labels) -> a classifier that reads both ways, with the policy's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    def save(labels):
        shape = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
                           intermediate_size=32, max_position_embeddings=256, num_labels=labels)
        BertForSequenceClassification(shape).save_pretrained(tmp_path / "encoder")
        AutoTokenizer.from_pretrained(files.policy).save_pretrained(tmp_path / "encoder")
        return tmp_path / "encoder"

    return save


def test_a_critic_of_a_classifier_with_several_labels(refused, encoder):
    message = refused(f"--critic.path={encoder(3)}")
    assert "critic.path=" in message and "classifier with 3 labels" in message and "one label" in message


def test_shards_of_a_reward_model_that_does_not_pack(refused, encoder):
    rewards = {"main": {"type": "model", "path": str(encoder(1))}}
    message = refused("--reward.shards=2", "--reward.workers=2", rewards=rewards)
    assert "rewards.main.path=" in message and "'bert'" in message and "set reward.shards to 1" in message


def test_a_tokenizer_with_ids_that_the_model_lacks(refused, files, tmp_path):
    wide = make_tiny_llama(tmp_path / "wide", 80, hidden=32, heads=1)
    message = refused(model={"path": str(files.policy), "tokenizer": str(wide)})
    assert "id 79" in message and "only 64 embeddings" in message


def test_a_reward_model_that_is_a_language_model(refused, files):
    message = refused(rewards={"main": {"type": "model", "path": str(files.policy)}})
    assert f"rewards.main.path='{files.policy}' is not a reward model" in message and "rlhf-ray reward-model" in message


def test_an_unknown_key_is_named_with_what_was_probably_meant(refused):
    message = refused("--algorithm.clip_lo=0.1")
    assert "clip_lo" in message and "clip_low" in message


def test_prompts_and_responses_over_the_context(refused):
    room = {"micro_batch_tokens": 999}
    message = refused(prompts={"max_tokens": 250}, policy=room, critic=room)
    assert "prompts.max_tokens=250" in message and "generator.sampling.max_tokens=12" in message and "256" in message


def test_batch_sizes_that_do_not_divide(refused):
    message = refused("--algorithm.mini_batches=3")
    assert "8 x 2 = 16" in message and "algorithm.mini_batches=3" in message


def test_more_than_the_pools_give(refused):
    message = refused(pools={"default": {"cpus": 0.5}})
    assert "pools.default has 0.5 cpus" in message and "raise pools.default.cpus" in message


def test_a_run_that_is_already_there(refused, configure, tmp_path, command_line):
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)
    outcome = command_line("ppo", configure(tmp_path / "run"))
    assert outcome.code == REFUSED and "already holds a run (checkpoints/)" in outcome.err and "--resume" in outcome.err


# Found out by workers


def test_a_malformed_row_is_named_by_its_line(command_line, configure, files, tmp_path):
    lines = files.prompts.read_text().splitlines()
    lines[6] = '{"prompt": "w5 w6"'
    (tmp_path / "torn.jsonl").write_text("\n".join(lines))
    outcome = command_line("ppo", configure(tmp_path / "run", **LEAN, prompts={"path": str(tmp_path / "torn.jsonl")}))
    assert outcome.code == REFUSED
    assert "torn.jsonl" in outcome.err and "line 7" in outcome.err and "Traceback" not in outcome.err
    assert descendants() == []


def make_nan_reward_model(files, directory):
    """The tiny reward model with a damaged head: NaN for every text."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(files.reward)
    with torch.no_grad():
        model.score.weight[0, 3] = float("nan")
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(files.reward).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_a_reward_that_is_nan_stops_the_run_and_is_never_made_up(command_line, configure, files, tmp_path):
    broken = make_nan_reward_model(files, tmp_path / "nan")
    rewards = {"main": {"type": "model", "path": str(broken)}}
    outcome = command_line("ppo", configure(tmp_path / "run", **LEAN, rewards=rewards))
    assert outcome.code == FAILED
    assert f"the reward model {str(broken)!r} (rewards.main) gave nan" in outcome.err and "Traceback" not in outcome.err
    assert "epoch 0 row" in outcome.err and "A missing score is never" in outcome.err
    assert [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row or "eval/reward" in row] == []
    assert not (tmp_path / "run/model").exists() and not (tmp_path / "run/summary.json").exists()
    assert descendants() == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 80 MiB (a run asks for 64 free ones when it begins)."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs failed: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill_the_disk_after_the_first_checkpoint(monkeypatch, disk):
    """Leave 200 KiB, enough for numbers and texts and too little for a checkpoint."""
    from rlhf_ray.coordinator.recovery import Recovery

    save = Recovery.save

    async def save_and_fill(self):
        pause_s = await save(self)
        await self.settled()
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "ballast").write_bytes(bytes(free - 200 * 1024))
        return pause_s

    monkeypatch.setattr(Recovery, "save", save_and_fill)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_leaves_the_previous_checkpoint(
    command_line, configure, small_disk, monkeypatch, tmp_path
):
    fill_the_disk_after_the_first_checkpoint(monkeypatch, small_disk)
    file = configure(tmp_path / "run", **LEAN, run={"dir": str(small_disk / "run")}, checkpoint={"every": 1})
    outcome = command_line("ppo", file)
    assert outcome.code == FAILED, outcome.err
    assert "ran full" in outcome.err and "checkpoint of step 2" in outcome.err and "step_1 is intact" in outcome.err
    assert "Traceback" not in outcome.err
    store = CheckpointStore(small_disk / "run/checkpoints", keep=2)
    store.clean()  # as the next run does: another worker may still have written while the failed checkpoint was removed
    assert [path.name for path in store.root.iterdir()] == ["step_1"]
    assert store.latest()[0] == 1
    assert not (small_disk / "run/summary.json").exists() and descendants() == []
