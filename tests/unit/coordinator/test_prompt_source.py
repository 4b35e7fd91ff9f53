"""Prompts are opened again after a loss of their reader: the same rows, or an error that names what changed."""

import asyncio
import json

import pytest

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.coordinator.prompt_source import reopened
from rlhf_ray.errors import CheckpointError
from rlhf_ray.roles.data_readers import PromptReader
from tests.models import make_tiny_tokenizer


class Answer:
    def __init__(self, result):
        self.result = result

    async def value(self):
        return self.result


class LocalReaders:
    """A worker group whose one worker is an object of this process."""

    def __init__(self, reader):
        self.reader = reader

    def call(self, rank, method, *arguments):
        return Answer(getattr(self.reader, method)(*arguments))


def test_a_table_that_is_opened_again_has_the_rows_of_before(tmp_path):
    make_tiny_tokenizer(tmp_path / "m", 16)
    reader = PromptReader(ModelConfig(path=str(tmp_path / "m")))
    reader.start()
    path = tmp_path / "p.jsonl"

    def write(*prompts):
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    write("w2 w3", "w4")
    config, ready = PromptsConfig(path=str(path)), []
    began = {"training": reader.open("training", config)["contents"]}
    open_again = reopened(LocalReaders(reader), {"training": config}, began)
    asyncio.run(open_again(0, lambda: ready.append(True)))
    write("w2 w3", "w5")
    with pytest.raises(CheckpointError, match=r"the rows of .*p\.jsonl are not those that the run began with"):
        asyncio.run(open_again(0, lambda: ready.append(True)))
    assert ready == [True]
