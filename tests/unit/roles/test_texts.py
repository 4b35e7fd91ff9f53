"""Rollouts as text, and pairs ranked by a judge."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.scorer_names import scorer_rewards
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.rewards.protocol import finished, rollout_texts
from rlhf_ray.roles.micro_batch import AverageMeter
from rlhf_ray.roles.pair_ranker import PairRanker
from tests.unit.roles.conftest import rollout_of


@pytest.fixture(scope="module")
def tokenizer(policy_model):
    return load_tokenizer(policy_model)


@pytest.fixture
def texts():
    """Prompt w2 w3 with response w4 </s>; prompt w5 with response w6, inserted w7, response w8."""
    made = rollout_of([[0, 0, 1, 1], [0, 1, 0, 1]], ["stop", "length"])
    return replace(made, tokens=np.array([2, 3, 4, 1, 5, 6, 7, 8], dtype=np.int32))


def test_prompts_and_responses_without_special_tokens(texts, tokenizer):
    assert rollout_texts(tokenizer, texts, 2) == (["w2 w3", "w5"], ["w4", "w6\nw8"])
    assert rollout_texts(tokenizer, texts, 1) == (["w2 w3"], ["w4"])
    assert rollout_texts(tokenizer, texts, 0) == ([], [])
    assert rollout_texts(tokenizer, texts, 9) == rollout_texts(tokenizer, texts, 2), "no more than there are"


def test_a_row_without_response_is_all_prompt(tokenizer):
    empty = replace(rollout_of([[0, 0]]), tokens=np.array([2, 3], dtype=np.int32))
    assert rollout_texts(tokenizer, empty, 1) == (["w2 w3"], [""])


def test_finished_means_ended_by_itself():
    made = rollout_of([[0, 1]] * 3, ["stop", "length", "abort"])
    assert finished(made).tolist() == [True, False, False]


JUDGE = """
def judge(prompts, responses, labels):
    return [{scores}[response] + 8 * (label["topic"] != prompt)
            for prompt, response, label in zip(prompts, responses, labels)]
"""


@pytest.fixture
def rank(policy_model, tmp_path):
    """rank(scores, min_margin): the preference rows of two prompts with two responses each, judged so by a function
    that also reads the prompts and their other columns."""

    def run(scores, min_margin, texts=("w2", "w3"), messages=None):
        (tmp_path / "judge.py").write_text(JUDGE.format(scores=scores))
        judge = scorer_rewards(f"{tmp_path / 'judge.py'}:judge", "pairs.judge")
        made = rollout_of([[0, 1]] * 4, ["stop", "length", "stop", "stop"])
        made = replace(made, tokens=np.array([2, 10, 2, 11, 3, 12, 3, 13], dtype=np.int32),
                       keys=[SampleKey(0, row, sample) for row in (4, 7) for sample in (0, 1)])
        prompts = Prompts(offsets_of([1, 1]), np.array([2, 3], np.int32), list(texts),
                          [{"topic": text} for text in texts], np.array([4, 7]), messages)

        async def ranked():
            ranker = PairRanker(policy_model, judge, min_margin, longest=8)
            await ranker.start()
            try:
                return await ranker.rank(made, prompts)
            finally:
                await ranker.stop()

        return asyncio.run(ranked())

    return run


def test_neighbours_form_pairs_and_the_better_is_chosen(rank):
    rows = rank({"w10": 0.25, "w11": 0.75, "w12": 1.0, "w13": -1.0}, 0.1)
    assert rows == [
        {"prompt": "w2", "chosen": "w11", "rejected": "w10", "chosen_finished": False, "rejected_finished": True,
         "margin": 0.5},
        {"prompt": "w3", "chosen": "w12", "rejected": "w13", "chosen_finished": True, "rejected_finished": True,
         "margin": 2.0},
    ]


def test_the_prompt_of_a_pair_is_the_one_that_was_sampled_from(rank):
    """Messages, which a template has still to render, or the text with its special tokens."""
    messages = [{"role": "user", "content": "w2"}]
    rows = rank({"w10": 1.0, "w11": 0.0, "w12": 1.0, "w13": 0.0}, 0.1, texts=["w2", "</s>w3"],
                messages=[messages, None])
    assert [row["prompt"] for row in rows] == [messages, "</s>w3"]


def test_pairs_too_close_are_left_out_in_place(rank):
    rows = rank({"w10": 0.25, "w11": 0.5, "w12": 0.0, "w13": 0.5}, 0.5)
    assert rows[0] is None
    assert rows[1]["chosen"] == "w13", "a margin equal to the least one is kept"


def test_equal_scores_rank_nothing_whatever_the_margin(rank):
    rows = rank({"w10": 0.25, "w11": 0.25, "w12": 0.0, "w13": 0.5}, 0.0)
    assert rows[0] is None and rows[1]["chosen"] == "w13"


def test_a_meter_divides_once():
    meter = AverageMeter()
    meter.add(3, {"loss": torch.tensor(1.0)})
    meter.add(1, {"loss": torch.tensor(5.0)})
    meter.add(0, {"loss": torch.tensor(float("nan"))})
    assert meter.means() == {"loss": 2.0}
