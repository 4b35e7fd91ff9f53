"""The wording of a hundred errors and warnings, as a person reads them: what happened, with the value; which field;
what to do.

`messages.txt` holds the whole texts, and this test alone asserts them: other tests of errors assert type, field and
value. After a change that is meant, `MESSAGES=write python -m pytest tests/golden/test_messages.py` writes them anew.
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.config.load import STAGES, load
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.load_report import RowErrors
from rlhf_ray.data.row_readers import section_rows
from rlhf_ray.errors import RLHFError
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.rewards.function_source import FunctionSource
from rlhf_ray.workers.calls import Call, Deadline, Fence
from tests.unit.weights.receivers import buckets_of, make_receiver

TEXTS = Path(__file__).with_name("messages.txt")
MINIMAL = {
    "ppo": {"model": {"path": "m"}, "rewards": {"main": {"type": "model", "path": "r"}}, "prompts": {"path": "p"}},
    "sft": {"model": {"path": "m"}, "data": {"path": "d"}},
}
OVERRIDES = [
    "--run.steps=0", "--run.steps=many", "--run.stepz=5", "--steps=5", "--polcy", "--run=5", "--run.dir=null",
    "--run.epochs=2 --run.steps=3", "--policy.optimizer.warmup_ratio=0.1 --policy.optimizer.warmup_steps=3",
    "--policy.optimizer.betas=0.9", "--policy.optimizer.learning_rate=inf", "--algorithm.kl.kind=adaptve",
    "--policy.lora.rank=0", "--algorithm.mini_batches=3", "--coordinator.concurrency=15",
    "--coordinator.max_staleness=1 --generator.chunk=24", "--buffer.capacity_mb=2",
    "--policy.gradient_checkpointing=1.5",
    "--policy.micro_batch_tokens=700", "--policy.gpus=1", "--generator.workers=20",
    "--generator.pool=gpus", "--generator.sampling.temperature=0", "--policy.offload_optimizer=true",
    "--generator.sampling.top_p=0.9", "--generator.sampling.repetition_penalty=1.1",
    "--generator.sampling.min_tokens=300", "--generator.sampling.stop=['']",
    "--reference.shards=2 --reference.workers=3", "--reward.shards=2 --reward.workers=2 --reward.gpus=0.5",
    "--reference.revision=v1", "--critic.init=reward --critic.path=other",
    "--algorithm.estimator=grpo --coordinator.samples_per_prompt=1",
    "--algorithm.kl.kind=adaptive --algorithm.kl.coef=0",
    "--evaluation.every=5",
    "--algorithm.estimator=reinforce --critic.cpus=0.2 --critic.zero_stage=0",
    "--algorithm.clip_lo=0.1", "--algorithm.importance=none", "--algorithm.estimator.lamda=0.9",
    "--algorithm.loss=cispo --algorithm.importance.tokens=mask",
    "--algorithm.loss=cispo --algorithm.old_logprobs=policy --coordinator.max_staleness=1",
    "--algorithm.importance.band=[5,0.5]", "--algorithm.importance.geometric=[0.9,1.1]",
    "--algorithm.preset=grpo --algorithm.estimator=rloo",
    "--algorithm.epochs=1 --algorithm.mini_batches=1 --algorithm.loss.clip_high=0.3 --critic.optimizer.min_ratio=0.1 "
    "--algorithm.estimator.lam_alpha=0.05 --algorithm.loss.max_ratio=3",
    "--algorithm.estimator=reinforce --algorithm.estimator.lam=0.9 --rewards.main.tolerance=0.1",
    "--prompts.path=p.jsonl --prompts.split=test", "--logging.project=mine --evaluation.split=test",
    "--reward.quarantine_limit=0.2", "--run.dir=~no-such-user/x", "--prompts.path=$NO_SUCH_VARIABLE/x",
    f"--run.dir={'d' * 300}",
]
TOOLS = "--environments.tools.path=tools.py:look --environments.tools.max_tokens=768"
OVERRIDES += [
    f"{TOOLS} {more}" for more in (
        "--environments.tools.turns=3", "--environments.tools.on_failure.timeout=ignore",
        "--environments.tools.max_tokens=512", "--environments.cause.path=tools.py:look",
        "--rewards.a.type=environment --rewards.b.type=environment",
        "--rewards.steps.type=process --rewards.steps.path=p",
        "--algorithm.overlong_buffer=9 --environments.other.path=o.py:look",
        "--algorithm.overlong_filter=true --environments.tools.on_failure.parse=zero",
    )
]
OVERRIDES += ["--environments=[tools.py]", "--environments.tools.path=tools.py", "--environments.tools.max_turns=3",
              "--rewards.world.type=environment"]
FILES = {
    "not YAML": "run: {dir: x\nmodel: 3\n", "a key twice": "run: {steps: 3}\nrun: {seed: 3}\n",
    "a list": "- a\n- b\n", "empty": "",
}
ROWS = {
    "no such file": None, "an empty file": "", "not JSON": '{"text": 1', "no such column": '{"body": "x"}',
    "not text": '{"text": 3}',
}


def config(tmp_path, command, overrides):
    path = tmp_path / f"{command}.yaml"
    path.write_text(yaml.safe_dump(MINIMAL[command]))
    load(STAGES[command], path, overrides.split())


def file(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    load(STAGES["sft"], tmp_path / "c.yaml", [])


def rows(tmp_path, text):
    if text is not None:
        (tmp_path / "rows.jsonl").write_text(text)
    section, row_errors = DemonstrationsConfig(path=str(tmp_path / "rows.jsonl"), text="text"), RowErrors()
    for block in section_rows(section, row_errors):
        row_errors.values(block, lambda rows, i: rows.text(i, "text"))
    row_errors.check()


def other_cursor(_):
    PromptCursor([5, 3], 0, True, [1, 1]).load_state_dict(PromptCursor([5, 3], 0, True, [2, 1]).state_dict())


def changed_data(_):
    former, present = ([["prompts.jsonl", digest * 32]] for digest in "ab")
    PromptCursor(5, 0, True, contents=present).load_state_dict(PromptCursor(5, 0, True, contents=former).state_dict())


def no_rows(_):
    PromptCursor(0, 0, True)


def foreign_lease(_):
    buffer = ReplayBuffer(4, None, 0)
    chunk = buffer.reserve(2, 0)
    chunk.keys = [1, 2]
    chunk.fill("ref", 0, 20)
    buffer.commit(chunk)
    lease = buffer.lease(2, 0)
    buffer.ack(lease, 0)
    buffer.ack(lease, 0)


def torn_checkpoint(tmp_path):
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "manifest.json").write_text('{"step": 3')
    CheckpointStore(tmp_path, 2, warn=lambda _: None).latest()


def late_call(fence, timeout_s):
    async def run():
        loop = asyncio.get_running_loop()
        silent = loop.create_future()
        deadline = Deadline(timeout_s, "cluster.call_timeout_s")
        await Call("generator", 2, "generate", (silent,), silent, deadline, loop.time(), fence).done()

    run_in_virtual_time(run())


def older_weights(_):
    make_receiver(version=4).begin(3, 3)


def damaged_bucket(_):
    receiver, bucket = make_receiver(), buckets_of(5)[0]
    receiver.begin(5, 3)
    receiver.load(replace(bucket, arrays=[np.zeros_like(array) for array in bucket.arrays]))


def missing_bucket(_):
    receiver = make_receiver()
    receiver.begin(5, 3)
    receiver.load(buckets_of(5)[0])
    receiver.finish(5)


def function(name):
    asyncio.run(FunctionSource("mine", FunctionReward(type="function", function=name)).start())


CASES = {
    **{f"ppo {given}": lambda tmp, given=given: config(tmp, "ppo", given) for given in OVERRIDES},
    **{f"a configuration: {name}": lambda tmp, text=text: file(tmp, text) for name, text in FILES.items()},
    **{f"rows: {name}": lambda tmp, text=text: rows(tmp, text) for name, text in ROWS.items()},
    "sft without a file": lambda tmp: load(STAGES["sft"], tmp / "none.yaml", []),
    "a cursor of another mix": other_cursor, "a cursor of changed data": changed_data,
    "a cursor of no rows": no_rows, "a lease that is over": foreign_lease,
    "no checkpoint is kept": lambda tmp: CheckpointStore(tmp, 0), "a torn checkpoint": torn_checkpoint,
    "a call past its deadline": lambda _: late_call(Fence(), 30.0),
    "older weights": older_weights, "a damaged bucket": damaged_bucket, "a missing bucket": missing_bucket,
    "a function without a name": lambda _: function("just_a_name"),
    "a function in no file": lambda _: function("/nowhere/mine.py:score"),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("RLHF_RAY_")]:
        monkeypatch.delenv(name)


def told(case, tmp_path, caplog):
    """The error of a case, or what it warns of."""
    caplog.clear()
    try:
        CASES[case](tmp_path)
        text = "\n".join(f"{record.levelname}: {record.getMessage()}" for record in caplog.records)
    except RLHFError as error:
        text = f"{type(error).__name__}: {error}"
    assert text
    return text.replace(str(tmp_path), "DIR").replace(os.getcwd(), "CWD")


def golden():
    parts = TEXTS.read_text().split("\n== ")
    return dict(part.rstrip("\n").split("\n", 1) for part in parts[1:])


@pytest.mark.skipif(os.environ.get("MESSAGES") == "write", reason="they are being written")
@pytest.mark.parametrize("case", CASES)
def test_it_reads_as_it_is_kept(case, tmp_path, caplog):
    assert told(case, tmp_path, caplog) == golden()[case]


def test_no_text_is_left_over():
    assert list(golden()) == list(CASES)


@pytest.mark.skipif(os.environ.get("MESSAGES") != "write", reason="the texts are kept")
def test_write_the_texts(tmp_path, caplog):
    lines = ["Texts of errors and warnings, in the order of test_messages.py. DIR is the test's directory, CWD the "
             "working one.", ""]
    for number, case in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        lines += [f"== {case}", told(case, tmp_path / str(number), caplog), ""]
    TEXTS.write_text("\n".join(lines))
