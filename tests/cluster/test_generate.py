"""Trying a model and comparing two, on the real engine, against the forward pass of transformers."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_ray.cli.library_logging import LEVELS
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.stages.compare import CompareOptions
from rlhf_ray.stages.compare import run as compare
from rlhf_ray.stages.generate import GenerateOptions
from rlhf_ray.stages.generate import run as generate
from tests.chat_templates import make_chat_tokenizer
from tests.models import make_counting_reward_model, make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PROMPTS = ("w5 w6 w7", "w9 w10", "w20 w21 w22 w23")
GREEDY = SamplingConfig(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A reward model that likes tokens below half of the vocabulary."""
    return str(make_counting_reward_model(tmp_path_factory.mktemp("judge") / "model", 64))


def by_transformers(directory, prompt):
    """Greedy continuation of 8 tokens at most, and whether it ended by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True), int(made[-1]) == tokenizer.eos_token_id


def share_below_half(directory, judge, prompt, response):
    """The reward model's score of a text, by transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(directory)(f"{prompt} {response}", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(AutoModelForSequenceClassification.from_pretrained(judge)(tokens).logits[0, 0])


@pytest.fixture(autouse=True)
def environment_of_a_new_process(monkeypatch):
    """What other tests' command lines set for the libraries below does not reach these."""
    for variable in LEVELS:
        monkeypatch.delenv(variable, raising=False)


def test_greedy_answers_are_transformers_and_scores_the_reward_models(files, judge, tmp_path, capsys):
    output = tmp_path / "out" / "answers.jsonl"
    rows = generate(GenerateOptions(str(files.policy), GREEDY, prompts=PROMPTS, reward=judge, output=output),
                    io.StringIO())
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows
    scored = 0
    for row, prompt in zip(rows, PROMPTS, strict=True):
        text, ended = by_transformers(files.policy, prompt)
        assert (row["prompt"], row["response"], row["finish_reason"]) == (prompt, text, "stop" if ended else "length")
        if row["tokens"] == len(text.split()):  # nothing of it is left out of the text
            scored += 1
            assert row["score"] == pytest.approx(share_below_half(files.policy, judge, prompt, text), abs=1e-4)
    assert scored
    assert capsys.readouterr().out == "", "what is written to a file is not printed"


def test_sampling_follows_from_the_seed_and_each_sample_has_its_own(files, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))

    def ask(seed, **more):
        options = GenerateOptions(str(files.policy), SamplingConfig(max_tokens=8), n=3, seed=seed, **more)
        return [row["response"] for row in generate(options, io.StringIO("\n".join(PROMPTS)))]

    first = ask(1, file=str(tmp_path / "p.jsonl"))
    assert first == ask(1), "a file and a pipe ask the same"
    assert first != ask(2) and len(set(first[:3])) > 1 and len(first) == 9
    printed = capsys.readouterr().out
    assert printed.count("response: ") == 27 and printed.startswith(f"prompt: {PROMPTS[0]}\nresponse: {first[0]}\n")


def test_a_conversation_goes_on_until_an_empty_line(files, monkeypatch, capsys):
    typed = iter(["w5 w6 w7", "w3 " * 300, "w5 w6 w7", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    options = GenerateOptions(str(files.policy), GREEDY)
    assert generate(options, terminal) == []
    shown = capsys.readouterr().out
    text, _ = by_transformers(files.policy, "w5 w6 w7")
    assert shown.count(f"response: {text}\n") == 2
    assert "the prompt has 300 tokens" in shown, "a prompt that is too long does not end it"


def test_what_cannot_be_asked_is_refused_before_anything_is_loaded(files, tmp_path):
    model = str(files.policy)
    with pytest.raises(ConfigError, match="--prompt or from --file"):
        generate(GenerateOptions(model, GREEDY, prompts=PROMPTS, file="x"), io.StringIO())
    with pytest.raises(ConfigError, match="the same answer 2 times"):
        generate(GenerateOptions(model, GREEDY, prompts=PROMPTS, n=2), io.StringIO())
    with pytest.raises(DataError, match="standard input: no prompt"):
        generate(GenerateOptions(model, GREEDY), io.StringIO())
    with pytest.raises(DataError, match="p.jsonl, line 1 has no such column; other columns: none"):
        (tmp_path / "p.jsonl").write_text('{"prompt": "w2"}\n')
        compare(CompareOptions(model, model, str(tmp_path / "p.jsonl"), "exact_match", tmp_path / "c.html", GREEDY))


def test_two_models_through_the_command_line(files, judge, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(files.policy)
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS))
    command = [sys.executable, "-m", "rlhf_ray.cli.main", "compare", str(files.tied), str(tmp_path / "run"),
               "--prompts", str(tmp_path / "p.txt"), "--scorer", judge, "--n", "4", "--max-tokens", "8",
               "--output", str(tmp_path / "c.html")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = json.loads((tmp_path / "c.json").read_text())
    assert len(found["pairs"]) == 12 and found["prompts"] == 3
    assert found["wins"] + found["ties"] + found["losses"] == 12
    assert f"{tmp_path / 'run'} is a run; using its model, {tmp_path / 'run/model'}" in answer.stderr
    assert "verdict: " in answer.stdout
    assert len(answer.stderr.splitlines()) == 4, "what it does, and nothing of the libraries below"
    page = (tmp_path / "c.html").read_text()
    assert page.count('class="text card"') == 12 and found["pairs"][0]["a"] in page
    for pair in found["pairs"]:
        if pair["tokens"][1] == 8 and len(pair["b"].split()) == 8:  # nothing of it was left out of the text
            assert pair["scores"][1] == pytest.approx(
                share_below_half(files.policy, judge, pair["prompt"], pair["b"]), abs=1e-4)


def test_a_model_ties_with_itself(files, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS))
    found = compare(CompareOptions(str(files.policy), str(files.policy), str(tmp_path / "p.txt"), "vader",
                                   tmp_path / "c.html", SamplingConfig(max_tokens=8), n=2))
    assert (found.rate.wins, found.rate.ties, found.rate.losses, found.rate.rate) == (0, 6, 0, 0.5)
    assert all(pair.responses[0] == pair.responses[1] for pair in found.pairs), "the same seeds, the same answers"
    assert "neither is shown to be better" in capsys.readouterr().out


def test_episodes_are_played_without_ray_and_written_turn_by_turn(tmp_path, capsys):
    model = make_tiny_llama(tmp_path / "model", 448, positions=512)
    make_chat_tokenizer(model, "qwen2.5")
    rows = [{"prompt": f"q{i}", "number": i, "role": "user", "turns": 2} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = SamplingConfig(max_tokens=64, stop_token_ids=list(range(30, 110)))
    options = {"model": str(model), "sampling": sampling, "file": str(tmp_path / "p.jsonl"), "seed": 3,
               "environment": f"{Path(__file__).parent / 'episode_world.py'}:Talk"}
    shown = generate(GenerateOptions(**options), None)
    printed = capsys.readouterr().out
    assert [episode["cause"] for episode in shown] == ["completed"] * 3
    for number, episode in enumerate(shown):
        first, said, answer, *_ = episode["messages"]
        assert first["content"].startswith(f"say {number} ") and said["role"] == "assistant"
        assert answer["content"].startswith(f"1: {len(said['content'])} ")
        # `Talk` gives 1/4 for the first turn and 2/4 for the second.
        assert [turn["reward"] for turn in episode["turns"]] == [0.25, 0.5] and episode["score"] == 0.75
        assert f"episode {number + 1} of 3" in printed and f"user: {first['content']}" in printed
    assert "Talk: completed" in printed and "reward 0.75" in printed
