"""`generate` and `compare`: what they hand on, and what they refuse. The real engine answers in tests/cluster."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import rlhf_ray.stages.compare
import rlhf_ray.stages.generate
from rlhf_ray.cli import generate_commands
from rlhf_ray.cli.generate_commands import prepare_engine
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.sample_files import read_samples
from rlhf_ray.roles.engines.vllm_adapter import generator_environment
from rlhf_ray.stages.compare import CompareOptions
from rlhf_ray.stages.compare import run as compare
from rlhf_ray.stages.generate import GenerateOptions
from rlhf_ray.stages.generate import run as generate
from tests.unit.observability.episode_samples import save_episodes


@pytest.fixture
def asked(monkeypatch):
    """The options that either command handed to its stage, in order."""
    found = []
    monkeypatch.setattr(generate_commands, "prepare_engine", lambda: None)
    for module in (rlhf_ray.stages.generate, rlhf_ray.stages.compare):
        monkeypatch.setattr(module, "run", lambda options, *_: found.append(options))
    return found


def test_every_option_of_generate_is_handed_on(command_line, asked):
    assert command_line(
        "generate", "m", "--prompt", "one", "--prompt", "two", "--max-tokens=9", "--temperature=0.5", "--top-p=0.9",
        "--top-k=3", "--min-p=0.1", "--repetition-penalty=1.2", "--min-tokens=4", "--stop=\n\n", "--stop=END",
        "--stop-token-id=5", "--n=2", "--seed=7", "--no-chat", "--reward=vader", "--output=o.jsonl").code == 0
    assert command_line("generate", "m", "--environment=e.py:E", "--max-turns=3").code == 0
    options, episodes = asked
    assert (episodes.environment, episodes.max_turns) == ("e.py:E", 3)
    assert options.sampling == SamplingConfig(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.2, min_tokens=4,
        stop=["\n\n", "END"], stop_token_ids=[5])
    assert (options.model, options.prompts, options.file, options.column) == ("m", ["one", "two"], None, "prompt")
    assert (options.n, options.seed, options.chat, options.reward) == (2, 7, False, "vader")
    assert options.output == Path("o.jsonl")


def test_every_option_of_compare_is_handed_on(command_line, asked):
    assert command_line(
        "compare", "a", "b", "--prompts=p.jsonl", "--scorer=vader", "--column=q", "--limit=5", "--n=3", "--tie=0.1",
        "--seed=2", "--temperature=0", "--stop=END", "--output=c.html").code == 0
    assert command_line("compare", "a", "b", "--prompts=p.jsonl", "--environment=e.py:E", "--max-turns=2").code == 0
    options, episodes = asked
    assert (episodes.scorer, episodes.environment, episodes.max_turns) == (None, "e.py:E", 2)
    assert (options.first, options.second, options.prompts, options.scorer) == ("a", "b", "p.jsonl", "vader")
    assert (options.column, options.limit, options.n, options.tie, options.seed) == ("q", 5, 3, 0.1, 2)
    assert options.sampling == SamplingConfig(temperature=0, stop=["END"])
    assert options.output == Path("c.html") and options.chat


@pytest.mark.parametrize(("options", "words"), [
    (["--min-tokens=9", "--max-tokens=4"], "min_tokens=9 is more than max_tokens=4"),
    (["--temperature=0.001"], "temperature=0.001 would become 0.01 in vLLM"),
])
def test_sampling_that_cannot_be_is_refused_in_one_line(command_line, asked, options, words):
    result = command_line("generate", "m", *options)
    assert result.code == 2 and words in " ".join(result.err.split()) and asked == []


def test_sampling_without_effect_is_a_warning(command_line, asked, caplog):
    assert command_line("generate", "m", "--temperature=0", "--min-p=0.1").code == 0 and len(asked) == 1
    assert caplog.messages == ["--min-p=0.1 without effect: --temperature 0 takes the most likely token"]


@pytest.mark.parametrize("arguments", [("compare", "a", "b", "--scorer=vader"), ("compare", "a", "--scorer=vader"),
                                       ("generate",), ("generate", "m", "--top-p=2"), ("generate", "m", "--n=0")])
def test_what_is_missing_or_out_of_bounds_is_refused(command_line, asked, arguments):
    assert command_line(*arguments).code == 2 and asked == []


def test_options_that_exclude_each_other_are_refused(tmp_path):
    def said(run, options):
        with pytest.raises(ConfigError) as caught:
            run(options) if isinstance(options, CompareOptions) else run(options, None)
        return str(caught.value)

    of_one = {"model": "m", "sampling": SamplingConfig(), "prompts": ["a"]}
    assert "--max-turns 3 is of episodes" in said(generate, GenerateOptions(**of_one, max_turns=3))
    assert "--reward vader scores responses" in said(
        generate, GenerateOptions(**of_one, environment="e.py:E", reward="vader"))
    assert "--no-chat" in said(generate, GenerateOptions(**of_one, environment="e.py:E", chat=False))
    of_two = {"first": "a", "second": "b", "prompts": "p.jsonl", "output": tmp_path / "c.html",
              "sampling": SamplingConfig()}
    assert "neither is given" in said(compare, CompareOptions(**of_two, scorer=None))
    assert "both are given" in said(compare, CompareOptions(**of_two, scorer="vader", environment="e.py:E"))
    assert "--max-turns 3 is of episodes" in said(compare, CompareOptions(**of_two, scorer="vader", max_turns=3))


@pytest.fixture
def played(monkeypatch, tmp_path):
    """In place of a model, the episodes of `episode_samples` are played; returns their rows."""
    save_episodes(tmp_path)
    rows = read_samples(tmp_path / "samples", 1)

    async def play(*_):
        return rows

    monkeypatch.setattr(rlhf_ray.stages.generate, "model_of", lambda *_: None)
    monkeypatch.setattr(rlhf_ray.stages.generate, "played", play)
    return rows


def test_episodes_are_printed_or_written_as_samples_are(played, tmp_path, capsys):
    options = GenerateOptions("m", SamplingConfig(), prompts=["a", "b"], environment="e.py:E")
    returned = generate(options, None)
    printed = capsys.readouterr().out
    assert "episode 1 of 2" in printed and "turn 2" in printed and "episode 2 of 2" in printed
    assert generate(replace(options, output=tmp_path / "e.jsonl"), None) == returned
    written = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert written == returned and [one["cause"] for one in written] == [row["cause"] for row in played]
    assert capsys.readouterr().out == ""


def test_the_engines_environment_is_set_but_not_over_the_users(monkeypatch):
    for name in (*generator_environment(GenerationConfig()), "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    prepare_engine()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and os.environ["TORCH_COMPILE_DISABLE"] == "1"


def test_the_engines_environment_is_set_before_what_reads_it_is_imported():
    code = """
        import sys
        from rlhf_ray.cli.generate_commands import prepare_engine
        prepare_engine()
        assert not {"torch", "vllm"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.parametrize(("given", "level"), [("", "ERROR"), ("INFO", "INFO")])
def test_only_errors_of_vllm_are_shown_unless_a_level_is_set(command_line, asked, monkeypatch, given, level):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", given)
    if not given:
        monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    assert command_line("generate", "m", "--prompt=x").code == 0
    assert os.environ["VLLM_LOGGING_LEVEL"] == level
