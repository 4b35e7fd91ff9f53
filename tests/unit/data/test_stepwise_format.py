"""The format of steps beside a model's weights, and its tokens."""

import json

import pytest

from rlhf_ray.config.data import StepsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.stepwise_format import FILE, StepTokens, load_steps, save_steps
from rlhf_ray.errors import ConfigError, ModelError

STEPS = StepsConfig(placeholder="<|pad|>", good="Y", bad="N", separator="\n\n")


def test_what_was_saved_is_loaded(tmp_path):
    save_steps(STEPS, tmp_path)
    assert load_steps(ModelConfig(path=str(tmp_path)), "rewards.steps") == STEPS
    assert json.loads((tmp_path / FILE).read_text())["separator"] == "\n\n"


def test_a_model_without_one_is_named_with_the_way_out(tmp_path):
    with pytest.raises(ModelError, match=r"^rewards\.steps\.path='.*' has no process_reward\.json.*rlhf-ray process-r"):
        load_steps(ModelConfig(path=str(tmp_path)), "rewards.steps")


@pytest.mark.parametrize("content", ["{", "[]", '{"placeholder": "?"', '{"placeholder": "?", "god": "+"}',
                                     '{"placeholder": "?", "good": "?"}'])
def test_a_damaged_one_is_named(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ModelError, match=r"process_reward\.json is not the step format"):
        load_steps(ModelConfig(path=str(tmp_path)), "rewards.steps")


def test_special_tokens_may_serve(tokenizer):
    ids = StepTokens.of(STEPS, tokenizer)
    assert (ids.placeholder, ids.separator) == (0, tokenizer("\n\n")["input_ids"])


def test_a_tokenizer_that_knows_no_such_word_says_so(tmp_path):
    from transformers import AutoTokenizer

    from tests.models import make_tiny_tokenizer

    make_tiny_tokenizer(tmp_path, 20)  # unknown words become <pad>
    with pytest.raises(ModelError, match=r"steps\.good='\+' is not a single token"):
        StepTokens.of(StepsConfig(placeholder="w9"), AutoTokenizer.from_pretrained(tmp_path))
    ids = StepTokens.of(StepsConfig(placeholder="w9", good="w2", bad="w3", separator="w4"),
                        AutoTokenizer.from_pretrained(tmp_path))
    assert ids == StepTokens(9, 2, 3, [4])


def test_equal_tokens_are_refused():
    with pytest.raises(ConfigError, match="must be three different tokens"):
        StepsConfig(placeholder="+")


def test_rows_of_several_solutions(tokenizer):
    ids = StepTokens.of(STEPS, tokenizer)
    rows, places = ids.rows(tokenizer, [[5, 6], []], [["a", "b"], ["c"]])
    a, b, c = (tokenizer(x)["input_ids"] for x in "abc")
    assert rows == [[5, 6, *a, 0, *ids.separator, *b, 0], [*c, 0]]
    assert places == [[3, 5 + len(ids.separator)], [1]]
