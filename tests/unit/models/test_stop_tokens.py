"""The tokens that a model's files name as ends of a response, and files that name something else."""

import json
import shutil

import pytest

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.stages.preflight import check_model
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "plain", vocab=40)


@pytest.fixture
def model(plain, tmp_path):
    """model(file, entries) -> a model with these entries in the file."""

    def make(file, entries):
        directory = shutil.copytree(plain, tmp_path / "m", dirs_exist_ok=True)
        path = directory / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(entries if isinstance(entries, str) else json.dumps({**values, **entries}))
        return ModelConfig(path=str(directory))

    return make


@pytest.mark.parametrize(("file", "value", "ends"), [
    ("generation_config.json", [9, 3], [1, 3, 9]), ("generation_config.json", 5, [1, 5]),
    ("generation_config.json", None, [1]), ("config.json", [1, 7], [1, 7]), ("generation_config.json", [], [1]),
])
def test_ends_are_the_tokenizers_and_those_of_both_files(model, file, value, ends):
    config = model(file, {"eos_token_id": value})
    assert named_stop_tokens(load_tokenizer(config), config) == ends


def test_a_text_model_inside_of_another_is_read(model):
    config = model("config.json", {"eos_token_id": None, "vocab_size": None,
                                   "text_config": {"eos_token_id": 6, "vocab_size": 40}})
    assert named_stop_tokens(load_tokenizer(config), config) == [1, 6]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [40, -1, "</s>", [1, 99], [1, None], True, 1.0, {"a": 1}])
def test_something_else_than_tokens_is_refused_before_anything_starts(model, file, value):
    config = model(file, {"eos_token_id": value})
    with pytest.raises(ModelError, match=rf"^model\.path='.*/m': .*/m/{file} has eos_token_id=.*a number of 0 to 39"):
        check_model(config, "model")


@pytest.mark.parametrize(("content", "said"), [("{", "cannot be read as JSON"), ("[1]", "holds list instead"),
                                               ('{"eos_token_id": ', "cannot be read as JSON")])
def test_a_damaged_file_is_refused_before_anything_starts(model, content, said):
    with pytest.raises(ModelError, match=f"^model.path='.*/m': .*generation_config.json {said}.*estore it"):
        check_model(model("generation_config.json", content), "model")
