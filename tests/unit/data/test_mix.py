"""Several data sets in place of one: what each contributes, under which numbers, and what is held out."""

import json
from typing import Any

import numpy as np
import pytest

from rlhf_ray.checkpoint.state_files import save_state
from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, ProcessRowsConfig, PromptsConfig, StepsConfig
from rlhf_ray.config.derived import derive
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import NumberReward
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.rollout_source import PromptSource
from rlhf_ray.data.load_report import left_out_lines
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.errors import CheckpointError, ConfigError, DataError
from rlhf_ray.roles.data_readers import HELD_OUT, DataReader, PromptReader
from rlhf_ray.roles.pretraining_mix import PretrainingMix


@pytest.fixture
def two(write_jsonl) -> list[dict[str, Any]]:
    """Eight prompts in one file, four in another under another column."""
    first = write_jsonl(*({"prompt": f"We saw {n}", "n": n} for n in range(8)), name="first.jsonl")
    second = write_jsonl(*({"q": f"I read {n}", "n": n} for n in range(4)), name="second.jsonl")
    return [{"path": first, "weight": 3}, {"path": second, "column": "q", "limit": 3}]


@pytest.fixture
def reader(tokenizer_directory) -> DataReader:
    found = DataReader(ModelConfig(path=str(tokenizer_directory)))
    found.start()
    return found


def test_parts_take_what_they_do_not_say_from_the_section():
    config = PromptsConfig(mix=[{"path": "a", "column": "q", "weight": 2}, {"path": "b", "split": "test"}],
                           split="dev", max_tokens=7, limit=5)
    assert [(p.path, p.column, p.split, p.limit, p.max_tokens) for p in config.parts()] == [
        ("a", "q", "dev", 5, 7), ("b", "prompt", "test", 5, 7)]
    assert config.weights == [2, 1] and config.title == "a + b"
    assert PromptsConfig(path="a").parts() == [PromptsConfig(path="a")]


def test_a_column_of_two_formats_is_refused():
    with pytest.raises(ConfigError, match="prompt='p' and messages='m' are two formats"):
        DemonstrationsConfig(mix=[{"path": "a", "messages": "m"}], prompt="p")


def test_prompts_of_all_data_sets_are_numbered_through(two, tokenizer):
    found = open_prompts(PromptsConfig(mix=two), tokenizer)
    assert found.training.sizes == [8, 3] and [report.kept for report in found.reports] == [8, 3]
    rows = found.training.rows([9, 0, 7])
    assert rows.texts == ["I read 1", "We saw 0", "We saw 7"] and rows.rows.tolist() == [9, 0, 7]
    assert rows.metadata == [{"n": 1}, {"n": 0}, {"n": 7}]


def test_held_out_prompts_are_whole_groups_in_neither_half(write_jsonl, tokenizer):
    path = write_jsonl(*({"prompt": f"We saw {n % 50}"} for n in range(200)))
    found = open_prompts(PromptsConfig(path=path, held_out=0.2), tokenizer)
    halves = [set(half.rows(range(len(half))).texts) for half in (found.training, found.held_out)]
    assert (len(found.training), len(found.held_out)) == (160, 40)
    assert len(halves[1]) == 10 and not halves[0] & halves[1]
    assert found.held_out.rows([3]).rows.tolist() == [3]
    with pytest.raises(DataError, match="no prompt 40: there are rows 0 to 39"):
        found.held_out.rows([40])


def test_a_data_set_that_would_be_held_out_whole_is_named(write_jsonl, tokenizer):
    mix = [{"path": write_jsonl(*({"prompt": f"We saw {n}"} for n in range(9)), name="a.jsonl")},
           {"path": write_jsonl({"prompt": "I read"}, name="b.jsonl")}]
    with pytest.raises(DataError, match=r"prompts.held_out=0.9 keeps all 1 rows of .*b.jsonl out"):
        open_prompts(PromptsConfig(mix=mix, held_out=0.9), tokenizer)


def test_the_prompt_reader_keeps_both_tables(two, tokenizer_directory):
    reader = PromptReader(ModelConfig(path=str(tokenizer_directory)))
    reader.start()
    found = reader.open("training", PromptsConfig(mix=two, held_out=0.2))
    assert sum(found["sizes"]) == 9 and found["held_out"] == [1, 1]
    texts = [set(reader.rows(range(n), table).texts) for n, table in ((9, "training"), (2, HELD_OUT))]
    assert len(texts[0] | texts[1]) == 11
    assert [report.split(": ")[1] for report in found["reports"]] == [
        "8 of 8 rows used, 1 of them held out", "3 of 3 rows used, 1 of them held out"]
    assert [source for source, _ in found["contents"]] == [part["path"] for part in two]
    assert found["chat"] is False


def test_the_prompt_reader_refuses_every_row_whose_answer_a_reward_cannot_use(write_jsonl, tokenizer_directory):
    """Beyond the rows that are checked before a run, in each data set of a mix, training and held-out ones."""
    reward = NumberReward(type="number")
    reader = PromptReader(ModelConfig(path=str(tokenizer_directory)), rewards={"rewards.sum": reward})
    reader.start()
    answers = [*range(1500), "\\sqrt{2}", "(3,4)", "1{,}000"]
    rows = [{"prompt": f"We {n}", "answer": answer} for n, answer in enumerate(answers)]
    good = write_jsonl(*rows[:5], name="good.jsonl")
    bad = write_jsonl(*({**row, "answer": str(row["answer"])} for row in rows), name="bad.jsonl")
    for config in (PromptsConfig(path=bad), PromptsConfig(mix=[{"path": good}, {"path": bad}], held_out=0.5)):
        with pytest.raises(DataError) as caught:
            reader.open("training", config)
        told = str(caught.value)
        assert told.startswith("2 rows cannot be used:"), told
        for line, value in ((1501, "sqrt{2}"), (1502, "(3,4)")):
            assert f"rewards.sum.answer='answer': {bad}, line {line} is " in told and value in told
    assert reader.open("training", PromptsConfig(path=good))["sizes"] == [5]


def test_a_limited_evaluation_has_the_first_held_out_rows_of_each_data_set(write_jsonl, tokenizer_directory):
    reader = PromptReader(ModelConfig(path=str(tokenizer_directory)))
    reader.start()
    mix = [{"path": write_jsonl(*({"prompt": f"{text} {n}"} for n in range(40)), name=f"{text}.jsonl")}
           for text in ("We", "I")]
    sizes = reader.open("training", PromptsConfig(mix=mix, held_out=0.3))["held_out"]
    held = PromptSource(None, HELD_OUT, sizes, [])
    source = PromptSource(None, "training", [], [], held_out=held).first_held_out(5)
    texts = reader.rows(source.numbers, HELD_OUT).texts
    assert [text.split()[0] for text in texts] == ["We"] * 5 + ["I"] * 5
    assert [*held.numbers] == [*range(sum(sizes))]


@pytest.mark.parametrize("kind", ["preferences", "process_rows"])
def test_a_prompt_of_several_data_sets_is_held_out_of_all(kind, write_jsonl, reader):
    columns = {"preferences": {"chosen": " yes", "rejected": " no"}, "process_rows": {"steps": ["x"], "labels": [1]}}
    rows = [{"prompt": f"We saw {n}", **columns[kind]} for n in range(100)]
    mix = [{"path": write_jsonl(*part, name=f"{i}.jsonl")} for i, part in enumerate((rows[:60], rows[30:] * 2))]
    if kind == "preferences":
        loaded = reader.preferences(PreferencesConfig(mix=mix, held_out=0.2))
    else:
        loaded = reader.process_rows(ProcessRowsConfig(mix=mix, held_out=0.2), StepsConfig(placeholder="?"))
    train, held = ({rows_of(part).row(i, "tokens").tobytes() for i in range(len(part))} for part in loaded[:2])
    assert len(held) > 5 and not train & held


def rows_of(part):
    return getattr(part, "chosen", part)


def test_rows_that_are_left_out_are_all_named(write_jsonl, tokenizer_directory):
    reader = PromptReader(ModelConfig(path=str(tokenizer_directory)))
    reader.start()
    long, short = {"prompt": "We saw the film and"}, {"prompt": "We"}
    mix = [{"path": write_jsonl(*rows, name=name)} for name, rows in
           (("a.jsonl", [long, short] * 150), ("b.jsonl", [short, long, short]))]
    found = reader.open("training", PromptsConfig(mix=mix, max_tokens=2))
    named = [json.loads(line) for line in left_out_lines(found["left_out"]).splitlines()]
    reason = "longer than max_tokens=2"
    assert named == [{"source": mix[0]["path"], "row": row, "reason": reason} for row in range(1, 300, 2)] + [
        {"source": mix[1]["path"], "row": 2, "reason": reason}]


def test_demonstrations_hold_out_the_end_of_each_data_set(write_jsonl, reader):
    mix = [{"path": write_jsonl(*({"text": f"{name} {n}"} for n in range(10)), name=f"{name}.jsonl"), "weight": w}
           for name, w in (("We", 1), ("I", 4))]
    train, held, summary = reader.demonstrations(DemonstrationsConfig(mix=mix, held_out=0.2))
    assert (summary.sizes, summary.weights, summary.rows, len(held)) == ([8, 8], [1, 4], 16, 4)
    assert len(train) == 16
    assert [report.split(":")[0] for report in summary.reports] == [part["path"] for part in mix]


def test_pairs_without_margins_count_as_zero_among_those_with(write_jsonl, reader):
    pair = {"prompt": "We", "chosen": " saw", "rejected": " read"}
    mix = [{"path": write_jsonl({**pair, "m": 2}, name="a.jsonl"), "margin": "m"},
           {"path": write_jsonl(pair, name="b.jsonl")}]
    train, _, summary = reader.preferences(PreferencesConfig(mix=mix, held_out=0))
    assert train.margins is not None and train.margins.tolist() == [2, 0] and summary.sizes == [1, 1]


def test_hard_labels_among_soft_ones_become_probabilities(write_jsonl, reader):
    mix = [{"path": write_jsonl({"prompt": "p", "steps": ["a", "b", "c"], "labels": labels}, name=f"{i}.jsonl")}
           for i, labels in enumerate(([True, False, None], [0.25, 1, 0]))]
    train, _, _ = reader.process_rows(ProcessRowsConfig(mix=mix, held_out=0), StepsConfig(placeholder="?"))
    assert train.labels.dtype == np.float32
    assert [train.row(i, "labels")[train.row(i, "placeholders")].tolist() for i in range(2)] == [
        [1, 0, -100], [0.25, 1, 0]]


def test_an_evaluation_without_prompts_needs_some_held_out():
    from rlhf_ray.config.load import load
    from rlhf_ray.config.stages import PPOConfig

    given = ["--model.path=m", "--rewards.main.type=model", "--rewards.main.path=r", "--prompts.path=p",
             "--evaluation={}"]
    with pytest.raises(ConfigError, match=r"evaluation.prompts is empty and prompts.held_out=0"):
        load(PPOConfig, None, given)
    assert load(PPOConfig, None, [*given, "--prompts.held_out=0.1"]).evaluation is not None


def test_an_evaluation_of_several_data_sets_has_all_their_rows(two, tokenizer):
    base = {"model": {"path": "m"}, "rewards": {"r": {"type": "number"}}, "prompts": {"path": "p.jsonl"}}
    config = PPOConfig(**base, evaluation={"mix": two, "limit": 2})
    opened = open_prompts(derive(config).evaluation_prompts, tokenizer)
    assert opened.training.sizes == [2, 3], "the second has a limit of its own"


def test_pretraining_text_of_several_data_sets_is_visited_by_weight(write_jsonl, reader, tmp_path):
    mix = [{"path": write_jsonl(*({"text": f"{word} {n}"} for n in range(10)), name=f"{word}.jsonl"), "weight": weight}
           for word, weight in (("We", 1), ("I", 3))]
    config = PtxConfig(mix=mix, batch_size=4)
    text, summary = reader.pretraining_text(config)
    assert (summary.sizes, len(text), len(summary.contents)) == ([10, 10], 20, 2)
    visited = PretrainingMix(config, text, 0, summary.sizes, summary.contents)
    first = text.row(0, "tokens")[0]
    for _ in range(5):
        rows = visited.next_rows()
        assert sum(rows.row(i, "tokens")[0] == first for i in range(4)) == 1, "one of four rows is of the first"
    save_state(tmp_path / "ptx.json", visited.state_dict())
    other = PretrainingMix(config, text, 0, summary.sizes, [summary.contents[0], [mix[1]["path"], "changed"]])
    with pytest.raises(CheckpointError, match=r"the rows of .*I\.jsonl are not those"):
        other.load(tmp_path / "ptx.json")
