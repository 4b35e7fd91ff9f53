"""Reward functions are called once with real prompts before anything starts. The whole check of `rewards` runs."""

import asyncio
import json
import logging
import time

import pytest

from rlhf_ray.config.derived import derive
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.roles.prompt_input import PromptInput
from rlhf_ray.stages import reward_trial
from rlhf_ray.stages.reward_preflight import check_rewards
from rlhf_ray.stages.scorers import check_answers
from tests.models import make_tiny_llama

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant "
ROWS = [{"prompt": "w5 w6", "answer": 7}, {"prompt": "w8"}, {"prompt": "w9", "late": 1}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = make_tiny_llama(tmp_path_factory.mktemp("policy") / "model", vocab=32, hidden=32, heads=1, layers=1)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def check(policy, tmp_path):
    """check(code, rows=ROWS, **sections): the checks of a run with this function."""

    def run(code, rows=ROWS, prompts=None, reward=None, **settings):
        (tmp_path / "mine.py").write_text(code)
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts = prompts or {"path": str(tmp_path / "prompts.jsonl")}
        config = PPOConfig(
            model={"path": str(policy)}, prompts={**prompts, "max_tokens": 8}, reward=reward or {},
            rewards={"mine": {"type": "function", "function": f"{tmp_path}/mine.py:score", **settings}})
        check_rewards(config, derive(config))

    return run


def warnings(caplog):
    """What was logged for the user; asyncio logs its selector at another level."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("code", "words"), [
    ("\ndef score(responses): return [1.0]",
     r"gave 1 scores for 2 responses; .*\n  .*mine\.py:2: def score\(responses\): return \[1\.0\]"),
    ("def score(responses): return [0.0, float('nan')]",
     r"gave nan for 1 of 2 responses\n  .*mine\.py:1: .*\n  prompt: 'w8'\n  response: 'So is this one'"),
    ("def score(responses, labels):\n    return [row['answer'] for row in labels]",
     r"KeyError: 'answer'\n  .*mine\.py:2: return \[.*\n  prompt: 'w8'\n"),
    ("async def score(completions, **kwargs):\n    return [kwargs['answers']]", r"KeyError: 'answers'\n  .*mine\.py:2"),
    ("def score(completions, **kwargs):\n    return [c[0]['content'] for c in completions]",
     r"TypeError: string indices .*\n  .*mine\.py:2: "),
    ("def score(responses, tokens): pass", r"cannot be used: TypeError: it requires tokens"),
    ("def score(responses): exit(3)", r"failed: SystemExit: 3"),
    ("import os\ndef score(responses): os._exit(3)", r"ended its process with exit code 3\n  prompt: 'w5 w6'"),
])
def test_what_is_wrong_with_a_function_is_found_before_anything_starts(check, code, words):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^the reward function '.*mine\.py:score' \(rewards\.mine\) .*{words}"):
        check(code)
    assert time.monotonic() - began < 5, "a second on a quiet machine"


def test_the_message_says_that_it_was_a_call_before_the_start(check):
    with pytest.raises(ConfigError, match=r"\(A call before the start, with the first rows of prompts\.path and inv"):
        check("def score(responses): return [None]")


@pytest.mark.parametrize("code", [
    "def score(responses, labels): return [float(row.get('answer', 0)) for row in labels]",
    "def score(completions, answer, late, **kwargs):\n    assert answer == [7, None] and late == [None, None]\n"
    "    return [0, 1]",
    "async def score(completions, completion_ids):\n    assert completion_ids[0][-1] == 1 != completion_ids[1][-1]\n"
    "    return [0, 1]",
])
def test_functions_that_work(check, code, caplog):
    check(code)
    assert not warnings(caplog)


def test_a_column_that_no_row_has(check):
    with pytest.raises(ConfigError, match=r"\(rewards\.mine\) cannot be used: it requires solution, which is no column "
                                          r"of the rows of prompts\.path \(their other columns: answer, late\), and"):
        check("def score(completions, solution, **kwargs): return [0.0] * len(completions)")


def test_a_column_that_one_data_set_of_a_mix_has_is_none_in_the_others(check, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"prompt": "w3", "solution": "x"}\n')
    mix = {"mix": [{"path": str(tmp_path / name)} for name in ("prompts.jsonl", "other.jsonl")]}
    check("def score(completions, solution, **kwargs):\n    assert solution in ([None, None], ['x'])\n"
          "    return [0.0] * len(completions)", prompts=mix)


def test_prompts_that_are_messages_are_messages_for_trl_and_rendered_for_ours(check):
    rows = [{"prompt": [{"role": "user", "content": "w4"}]}]
    check("def score(prompts, completions, **kwargs):\n    assert prompts == [[{'role': 'user', 'content': 'w4'}]]\n"
          "    assert completions[0][0]['role'] == 'assistant' and completions[0][0]['content']\n    return [1]", rows)
    check("def score(prompts, responses):\n    assert prompts == ['user w4 assistant ']\n    return [1]", rows)


def test_a_slow_function_is_noted_and_not_punished(check, monkeypatch, caplog):
    monkeypatch.setattr(reward_trial, "TRIAL_S", 0.5)
    check("import time\ndef score(responses): time.sleep(60)")
    assert "gave no score for 2 responses within 0.5 s, so it was not checked before the start" in caplog.text


@pytest.mark.parametrize("code", [
    "def score(responses): raise RuntimeError('Found no NVIDIA driver on your system')",
    "raise AssertionError('Torch not compiled with CUDA enabled')",
])
def test_a_function_that_needs_a_gpu_is_noted_and_not_punished(check, caplog, code):
    check(code)
    assert "the reward scorers may have the GPU" in caplog.text


def test_where_a_sample_may_remain_without_a_score_a_failed_call_is_a_warning(check, caplog):
    check("def score(responses): return [0.0, float('nan')]", reward={"on_failure": "quarantine"})
    (record,) = warnings(caplog)
    assert record.levelno == logging.WARNING and "gave nan for 1 of 2 responses" in record.message


def test_what_it_prints_is_shown(check, capfd):
    check("def score(responses):\n    print('called with', responses[0])\n    return [0, 1]")
    assert capfd.readouterr().out == "rewards.mine: called with This response is invented: 42.\n"


def test_a_scorer_of_a_command_is_called_too_also_within_a_running_loop(policy, tmp_path):
    from rlhf_ray.config.model import ModelConfig

    (tmp_path / "mine.py").write_text("def score(responses, labels): return [row['word'] for row in labels]")
    questions = [PromptInput("w2", "p, line 1", {"word": "three"})]

    async def ask():
        check_answers(f"{tmp_path}/mine.py:score", questions, ModelConfig(path=str(policy)), "--scorer")

    with pytest.raises(ConfigError, match=r"reward function .*mine\.py:score' failed: TypeError: score 0 of its") as e:
        asyncio.run(ask())
    assert "(rewards." not in str(e.value) and "prompt: 'w2'" in str(e.value)
