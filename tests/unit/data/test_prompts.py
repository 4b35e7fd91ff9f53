from itertools import product
from typing import Any

import pytest

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.data.load_report import LoadReport
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.data.prompts import sample_seed
from rlhf_ray.data.synthetic_reviews import ReviewFiles
from rlhf_ray.errors import DataError, ModelError
from rlhf_ray.records import Prompts, SampleKey
from tests.unit.data.left_out import left_out

CHAT = ("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}")


def load_prompts(config: PromptsConfig, tokenizer: Any) -> tuple[Prompts, LoadReport]:
    """The whole table and its report."""
    found = open_prompts(config, tokenizer)
    return found.training.rows(range(len(found.training))), found.reports[0]


@pytest.fixture
def chat_tokenizer(tokenizer_directory) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.chat_template = CHAT
    return tokenizer


def test_prompts_keep_order_tokens_texts_and_other_columns(write_jsonl, tokenizer):
    path = write_jsonl({"prompt": "We saw the film and", "answer": 7}, {"prompt": "I read", "answer": None})
    prompts, report = load_prompts(PromptsConfig(path=path), tokenizer)
    assert prompts.texts == ["We saw the film and", "I read"] and prompts.messages is None
    assert prompts.metadata == [{"answer": 7}, {"answer": None}]
    assert [tokenizer.decode(prompts.row(i, "tokens")) for i in range(2)] == prompts.texts
    assert prompts.tokens.dtype.name == "int32" and prompts.offsets[-1] == len(prompts.tokens)
    assert (report.rows, report.kept, report.left_out) == (2, 2, {})


def test_longer_prompts_are_left_out_counted_and_named_never_cut(write_jsonl, tokenizer):
    path = write_jsonl({"prompt": "We saw", "n": 1}, "", {"prompt": "We saw the film and", "n": 2},
                       {"prompt": "I read", "n": 3})
    prompts, report = load_prompts(PromptsConfig(path=path, max_tokens=2), tokenizer)
    assert prompts.texts == ["We saw", "I read"]
    assert prompts.metadata == [{"n": 1}, {"n": 3}]
    assert report.left_out == {"longer than max_tokens=2": left_out(report, 3)}


def test_all_prompts_too_long_is_an_error_that_says_how_long(write_jsonl, tokenizer):
    path, length = write_jsonl({"prompt": "We saw the film and"}), len(tokenizer("We saw the film and")["input_ids"])
    wrong = rf"no row is left.*longer than max_tokens=2 .*shortest prompt has {length} tokens"
    with pytest.raises(DataError, match=wrong):
        load_prompts(PromptsConfig(path=path, max_tokens=2), tokenizer)


def test_limit_and_column_are_obeyed(write_jsonl, tokenizer):
    path = write_jsonl({"q": "We saw"}, {"q": "I read"}, {"q": 3})
    prompts, _ = load_prompts(PromptsConfig(path=path, column="q", limit=2), tokenizer)
    assert prompts.texts == ["We saw", "I read"]


def test_a_bad_prompt_is_named_by_line(write_jsonl, tokenizer):
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: column 'prompt' is empty"):
        load_prompts(PromptsConfig(path=write_jsonl({"prompt": "We"}, {"prompt": ""})), tokenizer)
    with pytest.raises(DataError, match=r"line 1: no column 'prompt'; the row has \['text'\]"):
        load_prompts(PromptsConfig(path=write_jsonl({"text": "We"})), tokenizer)


def test_chat_messages_go_through_the_template_and_ask_for_an_answer(write_jsonl, chat_tokenizer):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "We saw"}]
    path = write_jsonl({"prompt": messages, "n": 1}, {"prompt": [{"role": "user", "content": "I read"}]})
    prompts, _ = load_prompts(PromptsConfig(path=path), chat_tokenizer)
    assert prompts.texts == ["[system] \n[user] We saw\n[bot]", "[user] I read\n[bot]"]
    assert [chat_tokenizer.decode(prompts.row(i, "tokens")) for i in range(2)] == prompts.texts
    assert prompts.metadata == [{"n": 1}, {}]
    assert prompts.messages == [messages, [{"role": "user", "content": "I read"}]]


@pytest.mark.parametrize(("row", "wrong"), [
    ("plain text", "must be a list of chat messages like the first row's, not str"),
    ([], "not an empty list"),
    ([{"role": "user"}], "each message must be an object with role and content"),
    (["hello"], "each message must be an object with role and content"),
    ([{"role": "user", "content": 5}], "column 'prompt.content' must be a text, not int"),
])
def test_malformed_messages_are_named_by_line(write_jsonl, chat_tokenizer, row, wrong: str):
    path = write_jsonl({"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": row})
    with pytest.raises(DataError, match=f"line 2: .*{wrong}"):
        load_prompts(PromptsConfig(path=path), chat_tokenizer)


def test_messages_without_a_template_or_against_it_are_errors(write_jsonl, tokenizer, chat_tokenizer):
    path = write_jsonl({"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ModelError, match=r"column 'prompt' holds chat messages, but the tokenizer .* no chat template"):
        load_prompts(PromptsConfig(path=path), tokenizer)
    chat_tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ModelError, match=r"line 1: .*refuses the messages, of roles \['user'\]: no users here"):
        load_prompts(PromptsConfig(path=path), chat_tokenizer)


def test_a_tokenizer_that_frames_texts_keeps_its_beginning_but_no_end(write_jsonl, tokenizer_directory):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_directory)
    plain = tokenizer("We saw")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A <|eos|>", special_tokens=[("<|pad|>", 0), ("<|eos|>", 1)])
    assert tokenizer("We saw")["input_ids"] == [0, *plain, 1]
    prompts, _ = load_prompts(PromptsConfig(path=write_jsonl({"prompt": "We saw"})), tokenizer)
    assert prompts.tokens.tolist() == [0, *plain]


def test_the_quickstarts_prompts_load_whole(review_files: ReviewFiles, tokenizer):
    prompts, report = load_prompts(PromptsConfig(path=str(review_files.prompts), max_tokens=21), tokenizer)
    assert len(prompts) == report.kept == report.rows == 8_000


def test_sample_seeds_are_pinned_nonnegative_and_differ_in_every_part():
    assert sample_seed(0, SampleKey(0, 0, 0)) == 8_662_518_681_111_019_217
    named = list(product(range(3), range(3), range(300), range(3)))
    seeds = {sample_seed(seed, SampleKey(*key)) for seed, *key in named}
    assert len(seeds) == len(named)
    assert min(seeds) >= 0 and 2**62 < max(seeds) < 2**63
    assert sample_seed(1, SampleKey(11, 1, 1)) != sample_seed(11, SampleKey(1, 1, 1))
