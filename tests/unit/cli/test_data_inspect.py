"""`rlhf-ray data inspect`, run on small files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_ray.cli.main import app
from rlhf_ray.errors import ConfigError, DataError
from tests.models import make_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tokenizer of words, with a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(directory, 32)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}w3 {% endif %}{{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}w3 {% endif %}")
    return directory


def inspect(tmp_path: Path, model: Path, rows: list, *options: str):
    """(exit code or error, output) of the command on these rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["data", "inspect", str(file), "--model", str(model), *options])
    return result.exception, result.output


def test_prompts_are_counted_measured_and_shown(tmp_path, model):
    error, output = inspect(tmp_path, model, [{"prompt": "w2 w3"}, {"prompt": "w4"}, {"prompt": " ".join(["w5"] * 9)}],
                            "--max_tokens=4")
    assert error is None
    assert "as prompts: 2 rows to use, 0 malformed, 1 left out" in output
    assert "left out: 1 longer than max_tokens=4 (line 3)" in output
    assert "tokens a row: shortest 1, median 1, 95% 1, longest 2; 3 in all" in output
    assert "row 1: 2 tokens, 0 with loss\n  w2 w3\n" in output and "row 3" not in output


def test_every_malformed_row_is_named_and_the_others_are_shown(tmp_path, model):
    error, output = inspect(tmp_path, model, [{"prompt": "w2"}, "{torn", {"prompt": 7}, {"prompts": "w2"}])
    assert error.code == 1
    assert "1 rows to use, 3 malformed" in output and "training stops at them" in output
    for wrong in ("line 2: not valid JSON", "line 3: column 'prompt' must be a text", "line 4: no column 'prompt'"):
        assert wrong in output


@pytest.mark.parametrize(("row", "kind", "shown"), [
    ({"text": "w2 w3"}, "demonstrations", ["row 1: 3 tokens, 3 with loss\n  «w2 w3 </s>»"]),
    ({"prompt": "w2", "response": "w3"}, "demonstrations", ["row 1: 3 tokens, 2 with loss\n  w2«w3 </s>»"]),
    ({"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]}, "demonstrations",
     ["row 1: 5 tokens, 2 with loss\n  w5 </s> w3«w6 </s>»"]),
    ({"prompt": "w2", "completion": "w3", "text": "w4"}, "demonstrations",
     ["read as prompts with responses (columns prompt and completion), not text\n",
      "row 1: 3 tokens, 2 with loss\n  w2«w3 </s>»"]),
    ({"prompt": "w2", "chosen": "w3", "rejected": "w4 w5"}, "preferences",
     ["row 1, chosen: 3 tokens, 2 with loss\n  w2«w3 </s>»", "row 1, rejected: 4 tokens, 3 with loss"]),
])
def test_the_kind_follows_from_the_columns_and_loss_is_shown(tmp_path, model, row, kind, shown):
    error, output = inspect(tmp_path, model, [row])
    assert error is None and f"as {kind}: 1 rows to use" in output
    assert all(text in output for text in shown)


def test_the_kind_follows_from_the_fields_that_name_the_columns(tmp_path, model):
    row = {"question": "w2", "better": "w3", "worse": "w4 w5"}
    error, output = inspect(tmp_path, model, [row], "--prompt=question", "--chosen=better", "--rejected=worse")
    assert error is None and "as preferences: 1 rows to use" in output


def test_judged_steps_show_their_labels_places(tmp_path, model):
    row = {"prompt": "w2", "steps": ["w3", "w4"], "labels": [1, None]}
    error, output = inspect(tmp_path, model, [row], "--placeholder=w9", "--good=w7", "--bad=w8", "--separator=w6")
    assert error is None and "as process: 1 rows to use" in output
    assert "row 1: 6 tokens, 1 with loss\n  w2 w3«w9»w6 w4 w9" in output


def test_fields_may_be_written_as_a_stage_writes_them(tmp_path, model):
    row = {"question": "w2", "steps": ["w3", "w4"], "labels": [1, None]}
    names = ["--steps.placeholder=w9", "--steps.good=w7", "--steps.bad=w8", "--steps.separator=w6"]
    error, output = inspect(tmp_path, model, [row], *names, "--data.prompt=question", "--data.steps=steps")
    assert error is None and "row 1: 6 tokens, 1 with loss\n  w2 w3«w9»w6 w4 w9" in output
    error, _ = inspect(tmp_path, model, [row], "--prompt=question")
    assert "steps.placeholder: is required" in str(error) and "or with --steps.placeholder=..." in str(error)
    error, output = inspect(tmp_path, model, [{"prompt": "w2"}] * 3, "--kind=prompts", "--column=question")
    assert output.count("no column 'question'") == 1 and "Set prompts.column," in output


def test_nothing_to_use_ends_with_code_2_after_saying_why(tmp_path, model):
    error, output = inspect(tmp_path, model, [{"prompt": "w2 w3"}], "--max_tokens=1")
    assert isinstance(error, DataError) and error.exit_code == 2
    assert "0 rows to use" in output and "left out: 1 longer than max_tokens=1 (line 1)" in output


@pytest.mark.parametrize(("row", "options", "said"), [
    ({"a": "w2"}, [], r"columns \['a'\] match no kind of data; set --kind"),
    ({"prompt": "w2"}, ["--colum=a"], "colum: unknown key; did you mean column?"),
])
def test_what_cannot_be_asked_is_an_error(tmp_path, model, row, options, said):
    error, _ = inspect(tmp_path, model, [row], *options)
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=said):
        raise error


def test_every_unusable_row_is_written_to_a_file(tmp_path, model):
    rows = [{"prompt": "w2"}, *({"text": "w3"} for _ in range(30)), "{torn", {"prompt": " ".join(["w5"] * 9)}]
    error, output = inspect(tmp_path, model, rows, "--kind=prompts", "--max_tokens=4",
                            f"--unusable={tmp_path / 'unusable.jsonl'}")
    assert error.code == 1 and "and 11 more (--unusable=FILE names all)" in output
    named = [json.loads(line) for line in (tmp_path / "unusable.jsonl").read_text().splitlines()]
    assert sorted(row["row"] for row in named) == list(range(2, 34))
    by_row = {row["row"]: row for row in named}
    assert by_row[31]["reason"].startswith("no column 'prompt'") and by_row[32]["reason"].startswith("not valid JSON")
    assert by_row[33] == {"source": str(tmp_path / "rows.jsonl"), "row": 33, "reason": "longer than max_tokens=4"}


def test_a_conversation_with_tools_is_shown_turn_by_turn(tmp_path, model):
    template = model / "chat_template.jinja"
    own = template.read_text()
    template.write_text(
        "{% for t in tools or [] %}{{ 'w9' if t.function.name }} {% endfor %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}w3 {% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
        "{{ c.function.arguments.item }} {% endfor %}{{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}w3 {% endif %}")
    tools = [{"name": "w20", "parameters": {"properties": {"item": {}, "shop": {}}}}]
    talk = [{"role": "user", "content": "w5"},
            {"role": "assistant", "tool_calls": [{"name": "w20", "arguments": '{"item": "w21"}'}]},
            {"role": "tool", "name": "w20", "content": "w22"},
            {"role": "assistant", "content": "w6 w7", "weight": 0}, {"role": "user", "content": "w8"},
            {"role": "assistant", "content": "w6"}]
    try:
        error, output = inspect(tmp_path, model, [{"messages": [{"role": "user", "content": " "}]},
                                                  {"messages": talk, "tools": tools}], "--kind=demonstrations",
                                "--messages=messages", "--rows=1")
    finally:
        template.write_text(own)
    assert error.code == 1 and "1 rows to use, 1 malformed" in output
    assert output.endswith("""\
  tools: w20(item, shop)
  user: w5
  assistant: calls w20(item="w21")  (3 tokens with loss)
  tool w20: w22
  assistant: w6 w7  (no loss)
  user: w8
  assistant: w6  (2 tokens with loss)
  as the model reads it:
  w9 w5 </s> w3«w20 w21 </s>»w22 </s> w3 w6 w7 </s> w8 </s> w3«w6 </s>»
""")
