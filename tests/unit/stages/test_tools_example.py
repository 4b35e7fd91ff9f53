"""The tools example's configurations and tokenizer: they fit each other and the environment."""

import asyncio
import json
import random
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.tool_tasks import WORDS
from rlhf_ray.errors import ConfigError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.stages import tools_example
from rlhf_ray.stages.example_stages import write_verdict
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with the example's data."""
    home = tmp_path_factory.mktemp("tools")
    tools_example.make_data(home, 0)
    return home


@pytest.fixture(scope="module")
def tokenizer(home):
    return load_tokenizer(ModelConfig(path=str(home / "data" / "tokenizer")))


def test_every_demonstration_is_learned_and_fits_the_model(home, tokenizer):
    sft = tools_example.RECIPE.config("sft", home, 0)
    rows, report = load_demonstrations(DemonstrationsConfig(**sft.data.model_dump(exclude_unset=True)), tokenizer)
    assert (report.rows, report.kept) == (4000, 4000)
    assert rows.lengths.max() <= 100 <= sft.model.architecture.max_positions
    assert 0.2 < rows.loss_mask.mean() < 0.4


def test_items_and_numbers_are_a_token_each_wherever_they_stand(tokenizer):
    for word in WORDS:
        [token] = tokenizer(word)["input_ids"]
        for text in (f"How much are {word} and", f'{{"item": "{word}"}}', f"\n{word}\n", f"1+{word}"):
            assert token in tokenizer(text)["input_ids"], text
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_data_that_are_there_are_kept(home):
    file = home / "data" / "sft.jsonl"
    made = file.read_text()
    file.write_text("mine")
    tools_example.make_data(home, 0)
    assert file.read_text() == "mine"
    file.write_text(made)


def test_an_estimator_without_a_configuration_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="the example tools has no --estimator rloo; leave it out, which means grpo"):
        tools_example.run(tmp_path / "run", "rloo", 0, [])
    assert not (tmp_path / "run").exists()


def test_the_verdict_is_the_held_out_episodes_before_and_after(tmp_path, capsys):
    before = {"reward": 0.2, "solved": 0.19, "turns": 4.5, "tool_calls": 3.5, "tool_failures": 0.3}
    after = {"reward": 0.95, "solved": 0.94, "turns": 5.0, "tool_calls": 4.0, "tool_failures": 0.1}
    (tmp_path / "evaluation.json").write_text(json.dumps({"before": before, "after": after, "texts": []}))
    write_verdict(tmp_path, tmp_path, {"SFT": 60.0}, "held-out questions right", tools_example.SHOWN,
                  tools_example.KEPT)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "success_before": 0.19, "success_after": 0.94, "turns_mean": 5.0, "tool_calls": 4.0, "tool_failures": 0.1,
        "seconds": {"SFT": 60.0}}
    assert "19.0% of held-out questions right before, 94.0% after" in capsys.readouterr().out


def test_the_recipe_names_the_environment_beside_it():
    assert tools_example.environment_file().is_file()
    assert Path(tools_example.environment_file()).parent == tools_example.RECIPE.folder()


def a_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Generators:
    """In place of vLLM: write what the prompt's seed says: calls that are right, refused, of no tool, of several tools,
    in words or cut off, and last words; with log-probabilities that follow from the seed."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def written(self, context, draw):
        """The text of a turn: mostly the next one that is right."""
        question = context[context.rindex("How much are"):]
        first, second = question.removeprefix("How much are ")[:question.index("?") - 13].split(" and ")
        answers = [part.split("\n</tool_response>")[0] for part in question.split("<tool_response>\n")[1:]]
        numbers = [each for each in answers if each.isdigit()]
        right = [a_call("lookup", item=first), a_call("lookup", item=second),
                 a_call("calculator", expression="+".join(numbers[:2])),
                 a_call("submit", answer=int(numbers[-1]) if numbers else 0), "Done."][min(len(answers), 4)]
        others = [a_call("lookup", item="gold"), a_call("lookup", item=7), a_call("buy", item=first),
                  a_call("calculator", expression="plum"), f"I look. {a_call('lookup', item=first)}", "Done.",
                  a_call("lookup", item=first) + "\n" + a_call("lookup", item=second),
                  "<tool_call>\n{\"name\": \"lookup\"}\n</tool_call>", a_call("submit", answer=11) + " so" * 60]
        return right if draw.random() < 0.8 else draw.choice(others)

    async def call(self, method, requests, *args, **named):
        [request] = requests
        context = self.tokenizer.decode(request.prompt, clean_up_tokenization_spaces=False)
        text = self.written(context, random.Random(request.seed))
        whole = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        kept = np.array(whole[:request.max_tokens], np.int32)
        logprobs = -np.random.default_rng(request.seed).random(len(kept)).astype(np.float32)
        return [Completion(kept, logprobs, np.full(len(kept), 3, np.int32),
                           "stop" if len(kept) == len(whole) else "length")]


def test_the_agent_has_the_tokens_that_the_class_has(home, tokenizer, tmp_path):
    """Through the gateway, by OpenAI's client, in the agent's own loop: a step's rollout is the same in every array."""
    config = tools_example.RECIPE.config("ppo", home, 0, file="grpo")
    model = ModelConfig(path=str(make_tiny_llama(tmp_path, vocab=len(tokenizer), hidden=32, heads=1, layers=1)),
                        tokenizer=str(home / "data" / "tokenizer"))
    rows = [json.loads(line) for line in (home / "data" / "prompts.jsonl").read_text().splitlines()[:8]]
    prompts = Prompts(np.arange(9), np.zeros(8, np.int32), ["-"] * 8,
                      [{name: row[name] for name in ("prices", "answer")} for row in rows], np.arange(8),
                      [row["prompt"] for row in rows])
    keys = [SampleKey(0, row, sample) for row in range(8) for sample in range(8)]

    async def rollout(path):
        environment = config.environments["tools"].model_copy(
            update={"path": path, "processes": 1, "max_turns": 5})
        runner = EpisodeRunner({"tools": environment}, model, config.generator.sampling, Generators(tokenizer))
        facts = await runner.start()
        try:
            return facts["tools"].shape, await runner.play(prompts, keys, 0)
        finally:
            await runner.stop()

    shape, native = asyncio.run(rollout(f"{tools_example.environment_file()}:Shop"))
    other_shape, through_gateway = asyncio.run(rollout(f"{tools_example.agent_file()}:agent"))
    assert (shape, other_shape) == ("class", "agent")
    for each in fields(native):
        one, other = getattr(through_gateway, each.name), getattr(native, each.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), each.name
        elif each.name != "episodes":
            assert one == other, each.name
    for one, other in zip(through_gateway.episodes, native.episodes, strict=True):
        assert (one.use, one.messages, one.tools) == (other.use, other.messages, other.tools)
        # The agent does not know which bound has cut off a turn, and asks for one turn too many.
        assert one.cause == other.cause or {one.cause[:10], other.cause[:10]} == {"truncated_"}
        assert list(map(told, one.turns[:-1])) == list(map(told, other.turns[:-1]))
        if one.use != "zero":  # where a call cannot be read: its reward is not asked for
            assert one.turns[-1].reward == other.turns[-1].reward
    causes = [episode.cause for episode in native.episodes]
    rewards = [episode.turns[-1].reward for episode in through_gateway.episodes]
    assert {"completed", "truncated_turn", "truncated_turns", "error_parse"} <= set(causes)
    assert set(rewards) == {0.0, 1.0}


def told(turn):
    """A turn, with its answers as a chat template reads them: an agent need not name a result's tool."""
    answers = [{name: text for name, text in message.items() if name != "name"} for message in turn.messages]
    return replace(turn, messages=answers)
