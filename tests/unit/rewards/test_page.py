"""What docs/rewards.md shows is what runs: its YAML is read as configurations, its Python called as rewards."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.rewards.sources import make_source
from rlhf_ray.user_code import sandbox_kernel as kernel

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
YAML, PYTHON = (re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
                for language in ("yaml", "python"))


def configuration(block: str) -> PPOConfig:
    return PPOConfig(model={"path": "m"}, prompts={"path": "p.jsonl"}, **yaml.safe_load(block))


@pytest.mark.parametrize("block", YAML)
def test_every_configuration_is_one(block):
    assert configuration(block).rewards


def test_every_type_is_shown():
    shown = {reward.type for block in YAML for reward in configuration(block).rewards.values()}
    assert shown == {"model", "process", "http", "function", "exact_match", "number", "regex", "json_schema",
                     "code"}


def told(name, section, requests):
    source = make_source(name, section, ModelConfig(path="m"), 64)

    async def live():
        try:
            await source.start()
            return (await source.score(requests)).scores.tolist()
        finally:
            await source.stop()

    return asyncio.run(live())


def test_the_functions_give_what_they_say(ask, tmp_path):
    (tmp_path / "rewards.py").write_text("".join(PYTHON))
    texts = ["sums are sums", "word " * 200]
    requests = [ask(t, i, metadata={"domain": "sums"}, finish_reason=r)
                for i, (t, r) in enumerate(zip(texts, ("stop", "length"), strict=True))]
    expected = {"brief": [0.97, 0.0], "in_domain": [1.0, 0.0], "asked": [1.3, 100.0]}
    for name, scores in expected.items():
        section = FunctionReward(type="function", function=f"{tmp_path}/rewards.py:{name}")
        assert told(name, section, requests) == pytest.approx(scores)


def test_the_function_for_trl_gives_what_it_says(ask, tmp_path):
    (tmp_path / "rewards.py").write_text("".join(PYTHON))
    chat = [{"role": "user", "content": "2 + 3 ="}]
    requests = [ask(text, i, messages=chat, metadata={"answer": "5"}) for i, text in enumerate(("it is 5", "six"))]
    section = FunctionReward(type="function", function=f"{tmp_path}/rewards.py:matches")
    assert told("matches", section, requests) == [1.0, 0.0]


RULES = {
    "exact": ("the ANSWER!", {"answer": "The answer"}, 1.0), "sum": ("2 + 2 #### 4.001", {"answer": "#### 4"}, 1.0),
    "shape": ("<think>\nhm\n</think> 4", {}, 1.0), "pick": ("so\nAnswer: B.", {"letter": "B"}, 1.0),
    "form": ('{"age": 3}', {}, -1.0),
}


def test_the_rules_judge_as_they_say(ask):
    rewards = next(c for block in YAML if "exact" in (c := configuration(block)).rewards).rewards
    assert rewards.keys() == RULES.keys()
    for name, (response, metadata, score) in RULES.items():
        assert told(name, rewards[name], [ask(response, metadata=metadata)]) == [score]


PROGRAMS = ["def add(a, b): return a + b", "def add(a, b): return a + b", "print(sum(map(int, input().split())))",
            "def add(a, b): return a + b"]


@pytest.mark.skipif(kernel.landlock_abi() < kernel.LEAST_ABI or bool(kernel.seccomp_problem()),
                    reason="Landlock or seccomp is missing here")
def test_the_rows_with_tests_are_scored_as_they_say(ask):
    blocks = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    rows = [json.loads(line) for block in blocks for line in block.splitlines() if '"tests"' in line]
    assert len(rows) == len(PROGRAMS)
    section = next(c.rewards["right"] for block in YAML if "right" in (c := configuration(block)).rewards)
    for program, score in ((None, 1.0), ("def add(a, b): return 0", 0.0)):
        texts = [f"So:\n```python\n{program or right}\n```" for right in PROGRAMS]
        requests = [ask(text, i, metadata=row) for i, (text, row) in enumerate(zip(texts, rows, strict=True))]
        assert told("right", section, requests) == [score] * 4
