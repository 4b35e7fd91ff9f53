"""The enumeration agrees with the system's cursor, of which it shares no code."""

import json
from itertools import islice

import pytest

from chaos.witness.data_order import DataOrder
from rlhf_ray.data.cursor import PromptCursor
from tests.cluster.tiny import PROMPT_TOKENS, write_prompts

PROMPTS = [(7, 8), (9,), (3, 4)]


@pytest.mark.parametrize("seed", [5, 3979])
def test_it_visits_rows_in_the_order_of_the_cursor(seed):
    order = DataOrder([(n,) for n in range(2, 22)], seed)
    visits = PromptCursor(20, seed, shuffle=True).next(110)
    assert list(islice(order.visits(), 110)) == [row for _, row in visits]


def test_prompts_that_are_too_long_have_no_row(tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", 20, seed=1, too_long=3)
    order = DataOrder.read(path, PROMPT_TOKENS, 5)
    first = json.loads(path.read_text().splitlines()[0])["prompt"]
    assert len(order.prompts) == 20 and order.prompts[0] == tuple(int(word[1:]) for word in first.split())


def test_a_sample_tells_its_prompt():
    order = DataOrder(PROMPTS, 5)
    assert [order.row_of(sample) for sample in ((7, 8, 3), (9, 9), (3, 4), (4, 4), (7,))] == [0, 1, 2, None, None]
    assert order.beginning_with((7, 8)) == {0} and order.beginning_with((3,)) == {2}


@pytest.mark.parametrize("prompts", [[(7, 8), (7, 8)], [(7,), (7, 8)], [(7, 8, 9), (7, 8)]])
def test_prompts_that_are_not_unique_are_refused(prompts):
    with pytest.raises(ValueError, match="not unique"):
        DataOrder(prompts, 5)
