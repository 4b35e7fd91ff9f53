"""A public agent program as it is: mini-swe-agent, in an environment of its own, plays episodes through the gateway.
Skipped where the package cannot be installed; it needs no network itself."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from rlhf_ray.data.tool_template import give_tool_template
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.user_code.keeper import SCRATCH
from tests.models import make_tiny_llama
from tests.pages import ROOT
from tests.slow.packages import python_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGE = "mini-swe-agent==2.4.6"
EXAMPLE = ROOT / "configs/examples/adapters/mini_swe_agent.yaml"
WORDS = ("tea", "rice", "it's salt")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The directory with the program `mini`. The variable MINI_SWE_AGENT names an environment that has it."""
    given = os.environ.get("MINI_SWE_AGENT")
    if given:
        return Path(given) / "bin"
    return python_with(PACKAGE, tmp_path_factory.mktemp("mini") / "venv").parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, with a chat template that has tools."""
    place = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([], SMALLEST_VOCABULARY, place)
    return give_tool_template(place)


def command(text):
    call = {"name": "bash", "arguments": {"command": text}}
    return f"I go on.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def solves(context, draw):
    """Writes the word of the task, and submits."""
    word = re.search(r"Write (.*) into answer\.txt", context)[1]
    if context.count("<tool_response>") == 0:
        return command(f"cat > answer.txt <<'EOF'\n{word}\nEOF")
    return command("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def wanders(context, draw):
    """Looks around without end, and leaves something running each time."""
    return command("sleep 600 > /dev/null 2>&1 & setsid sleep 600 > /dev/null 2>&1 & ls")


def floods(context, draw):
    """Reads more and more."""
    return command("yes abcdefg | head -n 40")


def talks(context, draw):
    """Calls no tool."""
    return "Let me think."


def babbles(context, draw):
    """As a model that has learned nothing: bytes, and tags."""
    return "".join(draw.choice(["<tool_call>", "</tool_call>", '{"name": "bash"', "{", "x", "é", "\n"])
                   for _ in range(60))


class Generators:
    """In place of vLLM; log-probabilities follow from the seed."""

    def __init__(self, tokenizer, text_of):
        self.tokenizer, self.text_of = tokenizer, text_of
        self.most_open = self.open = 0
        self.texts = []

    async def call(self, method, requests, *args, **named):
        [request] = requests
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(1)  # so that requests overlap
        self.open -= 1
        context = self.tokenizer.decode(request.prompt, clean_up_tokenization_spaces=False)
        text = self.text_of(context, random.Random(request.seed))
        self.texts.append(text)
        whole = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        kept = np.array(whole[:request.max_tokens], np.int32)
        logprobs = -np.random.default_rng(request.seed).random(len(kept)).astype(np.float32)
        return [Completion(kept, logprobs, np.full(len(kept), 3, np.int32),
                           "stop" if len(kept) == len(whole) else "length")]


def mine(process):
    """Whether a process was started by an episode of this test."""
    with suppress(psutil.Error):
        return SCRATCH in process.environ() and process.environ()[SCRATCH].startswith(os.environ["TMPDIR"])
    return False


@pytest.fixture
def played(programs, tokenizer, tmp_path, monkeypatch):
    """played(text of a turn by context and draw, samples, settings of the environment) -> (rollout, generators), of the
    example's configuration."""
    monkeypatch.setenv("PATH", os.environ["PATH"] + os.pathsep + str(programs))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.chdir(ROOT)
    (tmp_path / "scratch").mkdir()
    settings = yaml.safe_load(EXAMPLE.read_text())["environments"]["files"]
    made = make_tiny_llama(tmp_path / "model", vocab=len(tokenizer), hidden=32, heads=1, layers=1)
    model = ModelConfig(path=str(made), tokenizer=tokenizer.name_or_path)

    def play(text_of, samples=1, **changed):
        config = EnvironmentConfig(**(settings | {"max_tokens": 16384} | changed))
        generators = Generators(tokenizer, text_of)
        rows = [{"prompt": f"Write {word} into answer.txt.", "answer": word} for word in WORDS]
        prompts = Prompts(np.arange(len(rows) + 1), np.zeros(len(rows), np.int32), [row["prompt"] for row in rows],
                          [{"answer": row["answer"]} for row in rows], np.arange(len(rows)))
        keys = [SampleKey(0, row, sample) for row in range(len(rows)) for sample in range(samples)]

        async def run():
            runner = EpisodeRunner({"files": config}, model, SamplingConfig(max_tokens=512), generators, least_scored=0)
            await runner.start()
            try:
                return await runner.play(prompts, keys, 0)
            finally:
                await runner.stop()

        return asyncio.run(run()), generators

    yield play
    assert list((tmp_path / "scratch").iterdir()) == []
    assert [each.cmdline() for each in psutil.process_iter() if mine(each)] == []


def test_the_program_solves_its_tasks_many_at_a_time_and_every_token_is_recorded(played, tokenizer):
    rollout, generators = played(solves, samples=2)
    ended = {(each.cause, each.use, each.turns[-1].reward) for each in rollout.episodes}
    assert ended == {("completed", "train", 1.0)}
    assert generators.most_open > 1
    assert len(rollout) == 6, "its conversation is appended to: one row each"
    for number, each in enumerate(rollout.episodes):
        tokens = rollout.row(number, "tokens")
        mask = rollout.row(number, "response_mask")
        first, second = each.turns
        word = WORDS[number // 2]
        assert "You are a helpful assistant that can interact" in tokenizer.decode(tokens[:first.start])
        assert tokenizer.decode(tokens[first.start:first.stop]) == command(
            f"cat > answer.txt <<'EOF'\n{word}\nEOF") + tokenizer.eos_token
        assert '"returncode": 0' in tokenizer.decode(tokens[first.stop:second.start])
        assert mask.sum() == first.stop - first.start + second.stop - second.start
        assert [call["name"] for turn in each.turns for call in turn.tool_calls] == ["bash", "bash"]


def test_a_program_that_goes_on_ends_at_max_turns_and_what_it_started_ends_with_it(played):
    rollout, _ = played(wanders, max_turns=3)
    ended = {(each.cause, each.use, each.turns[-1].reward) for each in rollout.episodes}
    assert ended == {("truncated_turns", "train", 0.0)}
    assert [len(each.turns) for each in rollout.episodes] == [3] * 3
    assert rollout.finish_reasons == ["length"] * 3


def test_a_conversation_that_outgrows_the_context_ends_there(played):
    rollout, _ = played(floods, max_tokens=6000)
    assert {(each.cause, each.turns[-1].reward) for each in rollout.episodes} == {("truncated_episode", 0.0)}
    assert rollout.lengths.max() <= 6000


@pytest.mark.parametrize("policy", [talks, babbles])
def test_a_policy_that_calls_no_tool_fails_the_task_and_not_the_run(played, policy):
    rollout, _ = played(policy)
    ended = {(each.cause, each.use, each.turns[-1].reward) for each in rollout.episodes}
    assert ended == {("completed", "train", 0.0)}
    assert {len(each.turns) for each in rollout.episodes} == {3}, "it gives up after three such answers"


@pytest.mark.cluster
def test_a_run_is_trained_on_what_the_program_asks(programs, tokenizer, tmp_path):
    """The command of the example with a model from random weights, which calls no tool: two steps of four episodes."""
    model = make_tiny_llama(tmp_path / "model", vocab=len(tokenizer), hidden=64, heads=2, layers=1, positions=8192)
    tokenizer.save_pretrained(model)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(
        json.dumps({"prompt": f"Write {word} into answer.txt.", "answer": word}) + "\n" for word in ("tea", "rice")))
    changes = {"run.dir": tmp_path / "run", "run.steps": 2, "model.path": model, "prompts.path": tasks,
               "prompts.max_tokens": 128, "generator.chunk": 4, "generator.sampling.max_tokens": 32,
               "coordinator.prompts_per_step": 2, "coordinator.samples_per_prompt": 2,
               "environments.files.max_tokens": 8192, "policy.micro_batch_tokens": 8192,
               "environments.files.timeout_s.reset": 300}
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_ray.cli.main", "grpo", EXAMPLE, *(f"--{k}={v}" for k, v in changes.items())],
        cwd=ROOT, env={**os.environ, "PATH": os.environ["PATH"] + os.pathsep + str(programs), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "episodes/turns" in step]
    assert [step["episodes/cause/completed"] for step in steps] == [1.0, 1.0]
    assert [step["episodes/turns"] for step in steps] == [3.0, 3.0], "it gives up after three answers without a call"
    assert [step["reward/mean"] for step in steps] == [0.0, 0.0]
