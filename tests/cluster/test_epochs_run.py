"""`run.epochs` on the command line: a run to its end visits every training row exactly so often."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
import yaml

from tests.cluster.outside import command_line
from tests.cluster.resumed import samples
from tests.cluster.tiny import PROMPT_TOKENS, SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
EPOCHS, ROWS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 2, 20, 8, 2
STEPS = EPOCHS * ROWS // PROMPTS_PER_STEP


def finish(*arguments):
    """Run a command to its end; its output is shown if it fails."""
    run = command_line(*arguments)
    output, errors = run.communicate(timeout=500)
    assert run.returncode == 0, f"{output}\n{errors}"


def test_every_prompt_is_sampled_and_trained_on_in_every_epoch(configure, files, tmp_path):
    """Counted twice: in the texts of all samples that updates took, and in the ledger. Prompts that are too long are in
    neither."""
    file = configure(tmp_path / "run", **{
        **SMALL, "evaluation": None, "run": {"steps": None, "epochs": EPOCHS}})
    settings = yaml.safe_load(file.read_text())
    settings["run"].pop("steps")
    file.write_text(yaml.safe_dump(settings))
    finish("ppo", str(file))

    usable = [row["prompt"] for row in map(json.loads, files.prompts.read_text().splitlines())
              if len(row["prompt"].split()) <= PROMPT_TOKENS]
    assert len(usable) == ROWS
    tables = sorted((tmp_path / "run/samples").glob("step_*.parquet"))
    assert len(tables) == STEPS
    seen = Counter(row["prompt"] for table in tables for row in pq.read_table(table).to_pylist())
    assert seen == {text: count * EPOCHS * SAMPLES_PER_PROMPT for text, count in Counter(usable).items()}
    trained = Counter((epoch, row, sample) for epoch, row, sample, state, _, step in samples(tmp_path / "run")
                      if step is not None)
    assert trained == {(epoch, row, sample): 1 for epoch in range(EPOCHS) for row in range(ROWS)
                       for sample in range(SAMPLES_PER_PROMPT)}


def test_supervised_updates_are_as_many_as_the_rows_of_all_epochs_fill(configure, files, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"w{i + 2} w5 w6"}) + "\n" for i in range(24)))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump({
        "run": {"dir": str(tmp_path / "run"), "epochs": EPOCHS}, "model": {"path": str(files.policy)},
        "cluster": {"dashboard": False, "object_store_mb": 128}, "pools": {"default": {"cpus": 2}},
        "data": {"path": str(tmp_path / "texts.jsonl"), "held_out": 0.0, "max_tokens": 8},
        "training": {"batch_size": 8, "eval_every": 0}, "logging": {"ray_metrics": False}}))
    finish("sft", str(tmp_path / "sft.yaml"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["steps"], summary["rows"]) == (EPOCHS * 24 // 8, 24)
