"""Rows by number, for environments that make their own tasks: what they are, which are held out, and where they are
refused."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf_ray.config.data import PromptsConfig, PromptsSource
from rlhf_ray.config.derived import derive
from rlhf_ray.config.load import load, resolve
from rlhf_ray.config.stages import EvaluateConfig, PPOConfig, PreferencesStageConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.inspection import inspect
from rlhf_ray.data.load_report import RowErrors, contents_of
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.data.prompts import NO_PROMPT, prompt_of
from rlhf_ray.data.row_readers import BLOCK, has_local_rows, section_rows
from rlhf_ray.errors import CheckpointError, ConfigError
from rlhf_ray.stages.preflight import check_data
from tests.chat_templates import make_chat_tokenizer

WORLD = {"world": {"path": "world.py:World", "max_tokens": 2048}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A tokenizer with a chat template."""
    directory = tmp_path_factory.mktemp("chat")
    make_chat_tokenizer(directory, "qwen2.5")
    return AutoTokenizer.from_pretrained(directory)


def indices(rows):
    return [row["index"] for row in rows.metadata]


def config(cls=PPOConfig, **sections):
    return resolve(cls(**{"model": {"path": "m"}, "environments": WORLD, "prompts": {"numbered": 1000}, **sections}))


def evaluated(**sections):
    return derive(config(**sections)).evaluation_prompts


def test_rows_have_no_text_and_a_number(chat):
    opened = open_prompts(PromptsConfig(numbered={"count": 3, "first": 5, "columns": {"environment": "lake"}}), chat)
    rows = opened.training.rows([0, 1, 2])
    assert rows.metadata == [{"index": i, "environment": "lake"} for i in (5, 6, 7)]
    assert [prompt_of(text, messages) for text, messages in zip(rows.texts, rows.messages, strict=True)] == [""] * 3
    assert rows.messages == [NO_PROMPT] * 3 and min(rows.lengths) > 0


def test_there_are_as_many_as_counted_block_by_block():
    blocks = list(section_rows(PromptsConfig(numbered=BLOCK + 2), RowErrors()))
    assert [len(block) for block in blocks] == [BLOCK, 2]
    assert [row["index"] for block in blocks for row in block.records] == list(range(BLOCK + 2))
    assert blocks[1].records[1] == {"prompt": "", "index": BLOCK + 1} and blocks[1].lines == [BLOCK + 1, BLOCK + 2]


@pytest.mark.parametrize("given", [7, {"count": 7}, "7"])
def test_the_count_alone_is_enough(given):
    assert list(PromptsConfig(numbered=given).numbered.indices) == list(range(7))


def test_held_out_rows_are_some_numbers_and_training_has_the_others(chat):
    opened = open_prompts(PromptsConfig(numbered=100, held_out=0.1), chat)
    held, trained = (indices(part.rows(range(len(part)))) for part in (opened.held_out, opened.training))
    assert len(held) == 10 and sorted(held + trained) == list(range(100))
    assert any(index ^ 1 not in held for index in held), "rows are held out one by one, though all have one text"
    again = open_prompts(PromptsConfig(numbered=100, held_out=0.1), chat).held_out
    assert indices(again.rows(range(10))) == held


def test_an_evaluation_has_the_numbers_after_those_of_training():
    section = evaluated(evaluation={"numbered": 600})
    assert (section.numbered.indices, section.limit) == (range(1000, 1600), None)
    mixed = {"mix": [{"numbered": 30}, {"path": "p.jsonl"}, {"numbered": {"count": 10, "first": 70}}]}
    section = evaluated(prompts=mixed, evaluation={"mix": [{"numbered": 600}, {"path": "e.jsonl"}]})
    assert [(part.location, part.limit) for part in section.parts()] == [
        ("numbered rows 80 to 679", None), ("e.jsonl", 512)]
    assert evaluated(prompts={"path": "p.jsonl"}, evaluation={"numbered": 5}).numbered.indices == range(5)


def test_an_evaluation_alone_has_the_rows_that_a_run_with_that_file_would_have(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\nprompts: {numbered: 20}\nenvironments: {world: {path: 'w.py:W', max_tokens: 2048}}\n")
    def rows(*changes):
        return derive(load(EvaluateConfig, tmp_path / "run.yaml", list(changes))).evaluation_prompts.numbered.indices
    assert rows() == range(20)
    assert rows("--evaluation.numbered=5") == range(20, 25)
    mixed = derive(config(EvaluateConfig, prompts={"mix": [{"numbered": 3}, {"path": "p.jsonl"}]})).evaluation_prompts
    assert mixed.parts()[0].numbered.indices == range(3)


def test_numbers_that_are_trained_on_are_refused_in_an_evaluation():
    with pytest.raises(ConfigError, match=r"evaluation.numbered.first=999 gives numbered rows 999 to 1003, of which "
                                          r"prompts.numbered has some for training .numbered rows 0 to 999.; leave "
                                          r"first out, or set it to 1000"):
        config(evaluation={"numbered": {"count": 5, "first": 999}})
    other = {"count": 5, "first": 999, "columns": {"environment": "other"}}
    assert config(evaluation={"numbered": other}, environments={**WORLD, "other": WORLD["world"]})


@pytest.mark.parametrize(("sections", "why"), [
    ({"environments": {}, "rewards": {"main": {"type": "model", "path": "r"}}},
     r"prompts.numbered.count=1000 gives rows without texts, which only an environment can begin with"),
    ({"prompts": {"numbered": 3, "path": "p"}}, "prompts: path and numbered are set; keep one"),
    ({"prompts": {"numbered": 3, "mix": [{"path": "p"}]}}, "prompts: numbered and mix are set; keep one"),
    ({"prompts": {"mix": [{"path": "p", "numbered": 3}]}}, "mix.0: path and numbered are set; keep one"),
    ({"prompts": {"mix": [{"weight": 2}]}}, "set path, or numbered"),
    ({"prompts": {"numbered": {"count": 3, "columns": {"index": 1}}}}, "columns has index"),
    ({"prompts": {"numbered": 0}}, "count"),
    ({"evaluation": {"numbered": 3, "prompts": "e.jsonl"}}, "prompts and numbered are set; keep one"),
    ({"evaluation": {"numbered": 3}, "prompts": {"numbered": 9, "held_out": 0.5}},
     "it uses evaluation.numbered.count=3; leave that empty"),
])
def test_what_cannot_be_meant_is_refused(sections, why):
    with pytest.raises(ConfigError, match=why):
        config(**sections)


def test_pairs_need_prompts_with_texts():
    with pytest.raises(ConfigError, match=r"prompts.numbered.count=9 gives rows without texts, and this stage has no"):
        resolve(PreferencesStageConfig(model={"path": "m"}, prompts={"numbered": 9}))


def test_a_resume_with_other_numbers_is_refused(chat):
    def cursor(**fields):
        opened = open_prompts(PromptsConfig(numbered=fields), chat)
        return PromptCursor(opened.training.sizes, 0, True, contents=contents_of(opened.reports))

    state = cursor(count=8).state_dict()
    cursor(count=8).load_state_dict(state)
    for other in ({"count": 8, "first": 1}, {"count": 9}, {"count": 8, "columns": {"level": 2}}):
        with pytest.raises(CheckpointError, match="the rows of numbered rows .* are not those that the run began with"):
            cursor(**other).load_state_dict(state)


def test_checks_of_data_before_a_run_look_for_no_file(chat):
    section = PromptsConfig(numbered=20)
    check_data(section)
    found = inspect(section, chat, 1)
    assert (found.report.rows, found.report.kept, found.row_errors.count) == (20, 20, 0) and has_local_rows(section)
    assert np.all(found.lengths > 0)


def test_a_mix_has_numbered_rows_beside_those_of_files(chat, write_jsonl):
    path = write_jsonl(*({"prompt": f"We saw {n}"} for n in range(4)))
    section = PromptsConfig(as_chat=True, limit=3, mix=[{"path": path}, {"numbered": 5, "weight": 2}])
    assert [name for name, _ in section.named_parts()] == ["prompts.mix.0.path", "prompts.mix.1.numbered"]
    opened = open_prompts(section, chat)
    assert opened.training.sizes == [3, 5]
    assert [row.get("index") for row in opened.training.rows(range(8)).metadata] == [None] * 3 + [0, 1, 2, 3, 4]
    assert PromptsSource(numbered=5).numbered.count == 5
