"""Prompts from files, pipes and the command line, with and without a chat template."""

import json

import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import DataError, ModelError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.roles.prompt_input import PromptInput, encode_prompt_inputs, prompt_inputs_of_lines, read_prompt_inputs
from tests.models import make_tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


@pytest.fixture
def tokenizer(tmp_path):
    make_tiny_tokenizer(tmp_path / "t", 16)
    return load_tokenizer(ModelConfig(path=str(tmp_path / "t")))


def test_lines_are_texts_or_rows():
    found = prompt_inputs_of_lines(["w2\n", "\n", '{"prompt": "w3", "answer": 4}\n', "{not json\n"], "pipe", "prompt")
    assert [(q.content, q.location, dict(q.metadata)) for q in found] == [
        ("w2", "pipe, line 1", {}), ("w3", "pipe, line 3", {"answer": 4}), ("{not json", "pipe, line 4", {})]


def test_nothing_and_a_row_without_the_column_are_refused():
    with pytest.raises(DataError, match="pipe: no prompt"):
        prompt_inputs_of_lines(["", " \n"], "pipe", "prompt")
    with pytest.raises(DataError, match=r"pipe, line 1: no column 'prompt'; the row has \['question'\].*--column"):
        prompt_inputs_of_lines(['{"question": "w3"}'], "pipe", "prompt")


def test_files_of_rows_and_of_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "w2", "answer": 1}\n{"q": [{"role": "user", "content": "w3"}]}\n')
    (tmp_path / "a.txt").write_text("w2 w3\n\nw4\n")
    rows = read_prompt_inputs(str(tmp_path / "a.jsonl"), "q")
    assert rows[0].content == "w2" and dict(rows[0].metadata) == {"answer": 1}
    assert rows[1].content == [{"role": "user", "content": "w3"}] and rows[1].location.endswith("a.jsonl, line 2")
    assert [q.content for q in read_prompt_inputs(str(tmp_path / "a.txt"), "q")] == ["w2 w3", "w4"]
    assert len(read_prompt_inputs(str(tmp_path / "a.jsonl"), "q", limit=1)) == 1


def test_texts_go_through_the_template_where_there_is_one_unless_told_not_to(tokenizer):
    prompts = [PromptInput("w2 w3", "here"), PromptInput([{"role": "w4", "content": "w5"}], "there")]
    with pytest.raises(ModelError, match="there: column 'prompt' holds chat messages.*no chat template"):
        encode_prompt_inputs(prompts, tokenizer, chat=True)
    assert encode_prompt_inputs(prompts[:1], tokenizer, chat=True) == (["w2 w3"], [[2, 3]], None)
    tokenizer.chat_template = TEMPLATE
    texts, tokens, messages = encode_prompt_inputs(prompts, tokenizer, chat=True)
    assert texts == ["user w2 w3 w9", "w4 w5 w9"] and tokens[1] == [4, 5, 9] and tokens[0][-3:] == [2, 3, 9]
    assert messages == [[{"role": "user", "content": "w2 w3"}], [{"role": "w4", "content": "w5"}]]
    assert encode_prompt_inputs(prompts, tokenizer, chat=False)[2] == [None, prompts[1].content]
    assert encode_prompt_inputs(prompts, tokenizer, chat=False)[0] == ["w2 w3", "w4 w5 w9"]


def test_a_prompt_that_is_neither_text_nor_messages_is_named_by_its_place(tokenizer):
    prompts = prompt_inputs_of_lines([json.dumps({"prompt": 7})], "pipe", "prompt")
    with pytest.raises(DataError, match="pipe, line 1: column 'prompt' must be a text"):
        encode_prompt_inputs(prompts, tokenizer, chat=False)


def test_what_is_no_text_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"w2\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"a\.txt cannot be read as UTF-8 text"):
        read_prompt_inputs(str(tmp_path / "a.txt"), "prompt")


def test_rows_in_a_text_file_have_their_prompt_in_the_column_asked_for(tmp_path):
    (tmp_path / "p.txt").write_text('{"q": "w2", "n": 1}\nw3\nw4\n')
    prompts = read_prompt_inputs(str(tmp_path / "p.txt"), "q", limit=2)
    assert [(p.content, dict(p.metadata)) for p in prompts] == [("w2", {"n": 1}), ("w3", {})]
