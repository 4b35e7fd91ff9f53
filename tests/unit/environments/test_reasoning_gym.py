"""Tasks of reasoning-gym. The oracle is the library itself, called directly (reasoning-gym 0.1.25)."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_ray.config.derived import derive
from rlhf_ray.config.environment_sources import ReasoningGymSource
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.environments.adapters import reasoning_gym as adapter
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply
from rlhf_ray.environments.shapes import recognise
from rlhf_ray.errors import ConfigError, EpisodeFailed
from tests.pages import ROOT, fences

library = pytest.importorskip("reasoning_gym", reason="needs the extra: pip install 'rlhf-ray[reasoning-gym]'")

FAMILIES = {
    "chain_sum": {"max_terms": 3, "max_digits": 2},
    "knights_knaves": {"n_people": 3},
    "countdown": {"max_numbers": 4},
}
"""Arithmetic with one answer; a puzzle of logic; a puzzle whose score is partial, and is computed from the answer."""


def make(task, **fields):
    return adapter.make(ReasoningGymSource(task=task, **fields).model_dump(mode="json"))


def asked(made, row, seed=0):
    """An episode, and what the policy reads."""
    episode = made()
    return episode, episode.reset(row=row, seed=seed).messages


def reply(answer):
    text = f"I think so. <answer>{answer}</answer>"
    return Reply(text, text)


@pytest.mark.parametrize("task", FAMILIES)
def test_questions_and_scores_are_those_of_the_library(task):
    direct = library.create_dataset(task, seed=0, **FAMILIES[task])
    made = make(task, settings=FAMILIES[task], system=None)
    scores = set()
    for index in (0, 1, 5, 499, 100_000):
        item = direct[index]
        for answer in (item["answer"], "7", "1 + 2 + 3", "no idea", direct[index + 1]["answer"]):
            episode, messages = asked(made, {"prompt": "", "index": index})
            assert messages == [{"role": "user", "content": item["question"]}]
            step = episode.step(reply(answer))
            expected = float(direct.score_answer(answer, item))
            assert (step.reward, step.done, step.info["score"]) == (expected, True, expected)
            scores.add(expected)
    assert 1.0 in scores and len(scores) > 1


def test_a_puzzle_gives_part_of_the_reward_for_a_partial_answer():
    direct = library.create_dataset("countdown", seed=0)
    episode, _ = asked(make("countdown"), {"index": 3})
    score = episode.step(reply(direct[3]["metadata"]["numbers"][0])).reward
    assert 0 < score < 1 and score == direct.score_answer(str(direct[3]["metadata"]["numbers"][0]), direct[3])


def test_the_seed_of_the_task_chooses_other_items():
    questions = {asked(make("chain_sum", settings={"seed": seed}, system=None), {"index": 2})[1][0]["content"]
                 for seed in (0, 1000, 2000)}
    assert len(questions) == 3
    assert library.create_dataset("chain_sum", seed=1000)[2]["question"] in questions


def test_without_an_index_the_seed_of_the_episode_chooses_among_the_first_items():
    direct = library.create_dataset("chain_sum", seed=0, size=10)
    made = make("chain_sum", settings={"size": 10}, system=None)
    for seed, index in ((3, 3), (23, 3), (2**31 - 1, 7)):
        assert asked(made, {}, seed)[1][0]["content"] == direct[index]["question"]


@pytest.mark.parametrize("index", [-1, 1.5, "3", True])
def test_an_index_that_is_none_is_an_error_with_its_value(index):
    with pytest.raises(ValueError, match=f"index=.*{index}"):
        asked(make("chain_sum"), {"index": index})


def test_an_item_beyond_a_task_of_limited_size_is_an_error_with_the_setting():
    made = make("list_functions", settings={"size": 20})
    asked(made, {"index": 19})
    with pytest.raises(ValueError, match="no item 20, only the 20 of settings.size"):
        asked(made, {"index": 20})


@pytest.mark.parametrize("name", ["default", "simple", "direct", "chain_of_draft", "DeepSeekZero"])
def test_system_prompts_are_the_library_s_by_name(name):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    _, messages = asked(make("chain_sum", system=name), {"index": 0})
    assert [each["role"] for each in messages] == ["system", "user"]
    assert messages[0]["content"] == SYSTEM_PROMPTS[name].strip()


def test_a_row_s_own_prompt_is_put_before_the_question():
    question = library.create_dataset("chain_sum", seed=0)[0]["question"]
    made = make("chain_sum")
    _, messages = asked(made, {"prompt": "Now: {question} Go.", "index": 0})
    assert messages[1]["content"] == f"Now: {question} Go."
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Now:"}]
    _, messages = asked(made, {"prompt": own, "index": 0})
    assert [each["content"] for each in messages] == ["Be brief.", f"Now:\n\n{question}"]


def test_an_answer_is_read_within_tags_or_is_the_whole_text():
    answer = library.create_dataset("chain_sum", seed=0)[0]["answer"]
    for given, text, expected in (
            ({}, f"<answer>7</answer> no, <answer> {answer} </answer>", 1.0), ({}, answer, 0.0),
            ({"answer": "text", "system": None}, f" {answer}\n", 1.0),
            ({"answer": "text", "system": None}, f"<answer>{answer}</answer>", None)):
        episode, _ = asked(make("chain_sum", **given), {"index": 0})
        score = episode.step(Reply(text, text)).reward
        direct = library.create_dataset("chain_sum", seed=0)
        assert score == (direct.score_answer(text, direct[0]) if expected is None else expected), (given, text)


def test_answers_in_the_reasoning_do_not_count():
    answer = library.create_dataset("chain_sum", seed=0)[0]["answer"]
    episode, _ = asked(make("chain_sum"), {"index": 0})
    step = episode.step(Reply(f"<think><answer>{answer}</answer></think>none", "none", f"<answer>{answer}</answer>"))
    assert step.reward == 0.0


def test_after_a_wrong_answer_there_are_as_many_tries_as_set_and_the_last_score_counts():
    answer = library.create_dataset("chain_sum", seed=0)[0]["answer"]
    made = make("chain_sum", tries=3)
    episode, _ = asked(made, {"index": 0})
    first, second = episode.step(reply("wrong")), episode.step(Reply("none", "none"))
    assert [each.messages[0]["content"] for each in (first, second)] == [
        "That is not right. Try again.", "There is no answer within <answer> and </answer>. Try again."]
    assert [(each.reward, each.done) for each in (first, second)] == [(0.0, False)] * 2
    third = episode.step(reply(answer))
    assert (third.reward, third.done, third.info) == (1.0, True, {"score": 1.0, "tries": 3})
    episode, _ = asked(made, {"index": 0})
    assert [episode.step(reply("wrong")).done for _ in range(3)] == [False, False, True]
    episode, _ = asked(made, {"index": 0})
    assert episode.step(reply(answer)).done


@pytest.mark.parametrize(("fields", "why"), [
    ({"task": "chain_summ"}, "no task 'chain_summ'; did you mean chain_sum"),
    ({"task": "chain_sum", "settings": {"min_terms": 0}}, "settings=.'min_terms': 0.: AssertionError: min_terms"),
    ({"task": "chain_sum", "settings": {"colour": 1}}, "TypeError.*colour"),
    ({"task": "chain_sum", "system": "rude"}, "no system prompt 'rude'; it has DeepSeekZero, default"),
])
def test_what_the_library_does_not_have_is_refused_at_the_start(fields, why):
    with pytest.raises(ValueError, match=why):
        make(**fields)


def test_tags_that_nobody_reads_are_refused():
    with pytest.raises(ConfigError, match="answer=text scores all that is written, and system='default' asks"):
        ReasoningGymSource(task="chain_sum", answer="text")


def test_more_tries_than_turns_are_refused():
    with pytest.raises(ConfigError, match="tries=3 needs as many turns, and max_turns=2"):
        EnvironmentConfig(reasoning_gym={"task": "chain_sum", "tries": 3}, max_turns=2)


@pytest.mark.parametrize("task", FAMILIES)
def test_episodes_in_threads_side_by_side_get_the_items_of_their_index(task):
    made = make(task, settings=FAMILIES[task], system=None)
    direct = library.create_dataset(task, seed=0, **FAMILIES[task])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda index: asked(made, {"index": index})[1][0]["content"], range(40)))
    assert found == [direct[index]["question"] for index in range(40)]


def test_it_is_played_in_a_process_of_its_own_and_can_be_repeated():
    async def run():
        pool = EnvironmentPool("sums", EnvironmentConfig(reasoning_gym={"task": "list_functions"}))
        try:
            facts = await pool.start()
            with pytest.raises(EpisodeFailed, match=r"reasoning_gym list_functions.*no item 700"):
                await pool.open({"prompt": "", "index": 700}, seed=0)
            environment = await pool.open({"prompt": "", "index": 3}, seed=0)
            return facts, await environment.step(reply("[1]"))
        finally:
            await pool.stop()

    facts, step = asyncio.run(run())
    assert (facts.shape, facts.replayable, step.done) == ("environment", True, True)
    assert recognise(make("chain_sum")).shape == "environment"


def test_the_run_of_the_page_has_rows_of_its_own_for_training_and_evaluation(tmp_path, monkeypatch):
    """docs/reasoning_gym.md; `tests/slow/test_pages.py` runs its commands."""
    [text] = [fence.text for fence in fences(ROOT / "docs/reasoning_gym.md") if fence.file == "puzzles.yaml"]
    (tmp_path / "puzzles.yaml").write_text(text)
    config = load(PPOConfig, tmp_path / "puzzles.yaml", [])
    for environment in config.environments.values():
        asked(adapter.make(environment.reasoning_gym.model_dump(mode="json")), {"prompt": "", "index": 5031})
    held_out = derive(config).evaluation_prompts
    assert [part.numbers.indices for part in held_out.parts()] == [range(5000, 5032)] * 2


def test_a_missing_library_is_named_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'rlhf-ray\[reasoning-gym\]'"):
        make("chain_sum")
