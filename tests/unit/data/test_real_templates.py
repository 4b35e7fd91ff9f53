"""Chat templates of the kinds that published models have: what is asked, what carries loss, where turns end."""

import json

import pytest
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.config.model import NewModelConfig
from rlhf_ray.data.chat import ChatTemplate
from rlhf_ray.data.encoding import encode_prompts
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import load_tokenizer
from tests.real_models import KINDS, make_real_tokenizer, stop_ids

USER, ANSWER = {"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4"}
SYSTEM, AGAIN = {"role": "system", "content": "w9"}, {"role": "user", "content": "w5"}
ASKED = {
    "qwen": "<|im_start|> system w0 w1 <|im_end|> <|im_start|> user w2 w3 <|im_end|> <|im_start|> assistant",
    "llama": "<|begin|> <|header|> user <|/header|> w2 w3 <|eot|> <|header|> assistant <|/header|>",
    "gemma": "<bos> <turn> user w2 w3 </turn> <turn> model",
    "mistral": "<s> [INST] w2 w3 [/INST]",
}
ENDS = {"qwen": "<|im_end|>", "llama": "<|eot|>", "gemma": "</turn>", "mistral": "</s>"}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers") / kind
    make_real_tokenizer(path, kind)
    return path


@pytest.fixture
def tokenizer(directory):
    return load_tokenizer(NewModelConfig(architecture={}, tokenizer=str(directory)))


def inspect(directory, tmp_path, row, *options):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(app, ["data", "inspect", str(file), "--model", str(directory), *options])
    return result.exception, result.output


def asked(template, messages):
    """A prompt's tokens, as words."""
    from rlhf_ray.data.chat import PromptText

    messages = template.with_system(messages)
    [ids] = encode_prompts(template.tokenizer, [PromptText(template.render(messages, "row 1", ask=True), messages)])
    return " ".join(template.tokenizer.convert_ids_to_tokens(ids))


def test_a_question_is_written_once_with_what_opens_the_answer(kind, tokenizer):
    assert asked(ChatTemplate(tokenizer), [USER]) == ASKED[kind]


def test_a_system_message_is_written_or_refused(kind, tokenizer):
    template = ChatTemplate(tokenizer, system="w9")
    if kind == "gemma":
        said = r"row 1: .*refuses the messages, of roles \['system', 'user'\]: no system"
        with pytest.raises(ModelError, match=said):
            asked(template, [USER])
        return
    assert "w9" in asked(template, [USER]).split() and "w0" not in asked(template, [USER]).split()


def test_each_turn_of_the_assistant_carries_loss_up_to_its_end(kind, directory, tmp_path):
    error, output = inspect(directory, tmp_path, {"messages": [USER, ANSWER, AGAIN, ANSWER]})
    assert error is None, output
    end = ENDS[kind]
    assert output.count("«") == 2 and output.count(end + "»") == 2, output
    assert "4 with loss" in output
    pieces = [part.partition("»")[0].split() for part in output.replace(end, f" {end}").split("«")[1:]]
    assert pieces == [["w4", end]] * 2


def test_the_end_of_a_turn_is_one_of_the_ids_that_end_a_response(kind, tokenizer):
    assert tokenizer.convert_tokens_to_ids(ENDS[kind]) in stop_ids(kind)


def test_prompts_are_inspected_as_a_run_asks_them(kind, directory, tmp_path):
    error, output = inspect(directory, tmp_path, {"prompt": [USER]})
    assert error is None and "as prompts: 1 rows to use" in output
    assert f"row 1: {len(ASKED[kind].split())} tokens, 0 with loss" in output
