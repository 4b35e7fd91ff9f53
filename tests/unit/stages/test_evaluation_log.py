"""evaluation.json: before, after, and after an interruption."""

import json

import pytest

from rlhf_ray.coordinator.evaluation import Evaluation
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.evaluation_log import EvaluationLog


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def evaluation(reward, response, **more):
    metrics = {"reward": reward, "kl": 0.5, "distinct": 1.0, "responses": 2.0, **more}
    return Evaluation(metrics, [{"prompt": "p", "response": response}])


def saved(directory):
    return json.loads(directory.evaluation.read_text())


def test_before_and_after_stand_side_by_side(directory):
    log = EvaluationLog(directory, None)
    log.add(0, evaluation(1.0, "dull"))
    assert saved(directory)["texts"] == [{"prompt": "p", "before": "dull", "after": "dull"}]
    log.add(4, evaluation(2.0, "better"))
    log.add(8, evaluation(3.0, "best"))
    found = saved(directory)
    assert (found["step"], found["before"]["reward"], found["after"]["reward"]) == (8, 1.0, 3.0)
    assert found["texts"] == [{"prompt": "p", "before": "dull", "after": "best"}]
    assert log.last()["reward"] == 3.0


def test_the_summary_names_both_sides_of_the_scores_and_the_end_of_the_rest(directory):
    log = EvaluationLog(directory, None)
    assert log.summary() == {} and log.last() == {}
    log.add(0, evaluation(1.0, "a", gold=-0.5))
    assert log.summary() == {} and log.last()["gold"] == -0.5
    log.add(8, evaluation(3.0, "b", gold=0.5))
    assert log.summary() == {"gold_before": -0.5, "gold_after": 0.5, "reward_before": 1.0, "reward_after": 3.0,
                             "kl": 0.5, "distinct": 1.0}


def test_without_a_judge_there_is_no_gold(directory):
    log = EvaluationLog(directory, None)
    log.add(0, evaluation(1.0, "a"))
    log.add(8, evaluation(3.0, "b"))
    assert "gold_before" not in log.summary() and log.summary()["reward_after"] == 3.0


def test_a_resumed_run_still_knows_how_it_began(directory):
    EvaluationLog(directory, None).add(0, evaluation(1.0, "dull"))
    log = EvaluationLog(directory, resume_at=3)
    assert log.summary() == {}
    log.add(8, evaluation(3.0, "best"))
    assert saved(directory)["texts"] == [{"prompt": "p", "before": "dull", "after": "best"}]
    assert log.summary()["reward_before"] == 1.0


@pytest.mark.parametrize("resume_at, reward", [(8, 3.0), (9, 3.0), (7, 1.0)])
def test_a_resumed_run_keeps_the_evaluation_of_what_its_checkpoint_holds(directory, resume_at, reward):
    """One of a later step is of weights that will be made again."""
    log = EvaluationLog(directory, None)
    log.add(0, evaluation(1.0, "dull"))
    log.add(8, evaluation(3.0, "best"))
    resumed = EvaluationLog(directory, resume_at)
    assert resumed.last()["reward"] == reward
    assert resumed.summary().get("reward_after") == (3.0 if resume_at >= 8 else None)


def test_a_new_run_starts_with_nothing(directory):
    EvaluationLog(directory, None).add(0, evaluation(1.0, "dull"))
    assert EvaluationLog(directory, None).last() == {}


def test_texts_of_other_prompts_are_not_set_side_by_side(directory):
    EvaluationLog(directory, None).add(0, evaluation(1.0, "dull"))
    other = [{"prompt": "q", "response": "another"}, {"prompt": "r", "response": "one"}]
    EvaluationLog(directory, resume_at=3).add(8, Evaluation({"reward": 3.0}, other))
    assert saved(directory)["texts"] == [] and saved(directory)["after"]["reward"] == 3.0


def test_conversations_keep_their_messages(directory):
    """Also over a resume; another conversation with the same text is another prompt."""
    messages = [{"role": "user", "content": "p"}]
    text = {"prompt": "p", "messages": messages, "response": "a"}
    EvaluationLog(directory, None).add(0, Evaluation({}, [text]))
    EvaluationLog(directory, resume_at=3).add(8, Evaluation({}, [{**text, "response": "b"}]))
    assert saved(directory)["texts"] == [{"prompt": "p", "messages": messages, "before": "a", "after": "b"}]
    EvaluationLog(directory, resume_at=8).add(9, Evaluation({}, [{"prompt": "p", "response": "c"}]))
    assert saved(directory)["texts"] == []
