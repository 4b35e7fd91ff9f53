"""Chat templates in demonstrations, preferences and prompts: what carries loss, where turns end, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_ray.config.data import DemonstrationsConfig, PreferencesConfig, ProcessRowsConfig, PromptsConfig, StepsConfig
from rlhf_ray.data.demonstrations import NO_LOSS, load_demonstrations
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.preferences import load_preferences
from rlhf_ray.data.prompt_table import open_prompts
from rlhf_ray.data.prompts import stream_prompts
from rlhf_ray.data.stepwise_supervision import load_process_rows
from rlhf_ray.errors import DataError, ModelError

OPEN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|eos|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"
CLOSED = OPEN + ASK
"""Ends each turn with the end-of-sequence token and a line break."""
MARKED = ("{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eos|>"
          "{% endgeneration %}{% else %}{{ m.content }}<|eos|>{% endif %}{{ '\\n' }}{% endfor %}" + ASK)
ENDLESS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}" + ASK
"""Writes no token that could end a turn."""
FORGETFUL = "{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}<|eos|>\n{% endfor %}" + ASK
"""Leaves earlier turns out once later ones follow."""


@pytest.fixture
def chat(tokenizer_directory) -> Any:
    """chat(template) -> a tokenizer with that chat template."""
    from transformers import AutoTokenizer

    def make(template: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
        tokenizer.chat_template = template
        return tokenizer

    return make


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [turn("user", "Hi"), turn("assistant", "We saw"), turn("user", "And"), turn("assistant", "I read")]


def learned(rows: Any, tokenizer: Any, i: int = 0) -> tuple[str, list[str]]:
    """(the row as text, the pieces of it that carry loss)."""
    tokens, mask = rows.row(i, "tokens").tolist(), rows.row(i, "loss_mask").tolist()
    pieces: list[list[int]] = []
    for n, (token, loss) in enumerate(zip(tokens, mask, strict=True)):
        if loss and not (n and mask[n - 1]):
            pieces.append([])
        if loss:
            pieces[-1].append(token)
    return tokenizer.decode(tokens), [tokenizer.decode(piece) for piece in pieces]


def conversation(tokenizer: Any, path: str, **fields: Any) -> tuple[str, list[str]]:
    rows, _ = load_demonstrations(DemonstrationsConfig(path=path, messages="messages", **fields), tokenizer)
    return learned(rows, tokenizer)


@pytest.mark.parametrize("template", [CLOSED, MARKED])
def test_the_assistants_turns_carry_loss_with_their_ends_and_nothing_else_does(chat, write_jsonl, template):
    text, pieces = conversation(chat(template), write_jsonl({"messages": TALK}))
    assert pieces == ["We saw<|eos|>", "I read<|eos|>"]
    assert text == "[user]Hi<|eos|>\n[assistant]We saw<|eos|>\n[user]And<|eos|>\n[assistant]I read<|eos|>"


def test_a_row_ends_with_its_last_turn_to_learn(chat, write_jsonl):
    text, pieces = conversation(chat(CLOSED), write_jsonl({"messages": [*TALK, turn("user", "Bye")]}))
    assert pieces == ["We saw<|eos|>", "I read<|eos|>"] and text.endswith("I read<|eos|>")


def test_a_template_without_ends_gets_one_at_the_last_turn(chat, write_jsonl):
    text, pieces = conversation(chat(ENDLESS), write_jsonl({"messages": TALK}))
    assert pieces == ["We saw\n", "I read\n<|eos|>"] and text.endswith("[assistant]I read\n<|eos|>")


def test_a_conversation_may_begin_with_the_assistant(chat, write_jsonl):
    text, pieces = conversation(chat(CLOSED), write_jsonl({"messages": TALK[1:]}))
    assert pieces == ["We saw<|eos|>", "I read<|eos|>"] and text.startswith("[assistant]We saw")


def test_a_template_that_rewrites_earlier_turns_is_refused_by_line(chat, write_jsonl):
    path = write_jsonl({"messages": TALK[:2]}, {"messages": TALK})
    with pytest.raises(DataError, match=r"line 2: .*assistant's turn 4 is not a part.*Mark .* \{% generation %\}"):
        conversation(chat(FORGETFUL), path)
    assert conversation(chat(FORGETFUL), write_jsonl({"messages": TALK[:2]}))[1] == ["We saw<|eos|>"]


@pytest.mark.parametrize(("messages", "said"), [
    (TALK[:1], r"line 1: .* has no message with the role 'assistant' to train on; its roles are \['user'\]"),
    ("Hi", "must be a list of chat messages"), ([], "not an empty list"),
])
def test_rows_without_a_turn_to_learn_are_named(chat, write_jsonl, messages, said):
    with pytest.raises(DataError, match=said):
        conversation(chat(CLOSED), write_jsonl({"messages": messages}))


def test_conversations_need_a_template(tokenizer, write_jsonl):
    with pytest.raises(ModelError, match="no chat template"):
        conversation(tokenizer, write_jsonl({"messages": TALK}))


def test_a_system_message_is_put_before_chats_that_have_none(chat, write_jsonl):
    path = write_jsonl({"messages": TALK[:2]}, {"messages": [turn("system", "Own"), *TALK[:2]]})
    tokenizer = chat(CLOSED)
    config = DemonstrationsConfig(path=path, messages="messages", system="Be kind")
    rows, _ = load_demonstrations(config, tokenizer)
    starts = [learned(rows, tokenizer, i)[0].split("<|eos|>")[0] for i in range(2)]
    assert starts == ["[system]Be kind", "[system]Own"]


def test_keys_without_a_value_are_not_rendered(chat, tmp_path):
    """Parquet gives every message the keys of all, with null where a message has none: the same rows as JSON lines
    give the same text."""
    tokenizer = chat("{% for m in messages %}{{ m }}{% endfor %}")

    def call(name, arguments):
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [{**turn("assistant", ""), "tool_calls": [call(name, {argument: "1"})]} for name, argument in ("fa", "gb")]
    rows = [{"prompt": [turn("user", "Hi"), *calls, {**turn("tool", "2"), "name": "g"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = open_prompts(PromptsConfig(path=str(tmp_path / "rows.parquet")), tokenizer).training.rows([0])
    assert "None" not in found.texts[0] and found.messages == [rows[0]["prompt"]]


@pytest.mark.parametrize("load, config, columns", [
    (load_preferences, PreferencesConfig, {"chosen": " yes", "rejected": " no"}),
    (partial(load_process_rows, steps=StepsConfig(placeholder="?")), ProcessRowsConfig,
     {"steps": ["x"], "labels": [1]}),
])
def test_rows_with_text_prompts_refuse_a_system_message_too(chat, write_jsonl, load, config, columns):
    section = config(path=write_jsonl({"prompt": "Hi", **columns}), system="Be kind")
    with pytest.raises(DataError, match=r"'prompt' is a text, so system='Be kind' has no effect; set as_chat"):
        load(section, tokenizer=chat(CLOSED))


def test_sides_of_messages_make_a_text_prompt_a_chat_with_the_system_message(chat, write_jsonl):
    row = {"prompt": "Hi", "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}
    tokenizer = chat(CLOSED)
    pairs, _, _ = load_preferences(PreferencesConfig(path=write_jsonl(row), system="Be kind"), tokenizer)
    assert tokenizer.decode(pairs.chosen.row(0, "tokens")).startswith("[system]Be kind<|eos|>\n[user]Hi<|eos|>\n")


def test_conversations_of_which_no_text_is_marked_are_left_out(chat, write_jsonl):
    """A row without tokens would be a micro-batch of nothing."""
    marked = ("{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
              "{% else %}{{ m.content }}{% endif %}{% endfor %}")
    path = write_jsonl({"messages": TALK[:2]}, {"messages": [TALK[0], turn("assistant", "")]})
    rows, report = load_demonstrations(DemonstrationsConfig(path=path, messages="messages"), chat(marked))
    assert len(rows) == 1 and report.kept == 1
    assert [(lines.tolist(), reason) for _, reason, lines in report.left_out_rows()] == [([2], NO_LOSS)]


def test_a_system_message_without_chats_is_refused(chat, write_jsonl):
    path, tokenizer = write_jsonl({"prompt": "Hello"}), chat(CLOSED)
    with pytest.raises(DataError, match=r"'prompt' is a text, so system='Be kind' has no effect; set as_chat"):
        open_prompts(PromptsConfig(path=path, system="Be kind"), tokenizer)
    asked = open_prompts(PromptsConfig(path=path, system="Be kind", as_chat=True), tokenizer)
    assert "[system]Be kind" in asked.training.rows([0]).texts[0]


def test_texts_become_chats_when_asked(chat, write_jsonl):
    tokenizer, path = chat(CLOSED), write_jsonl({"prompt": "Hi", "answer": 4})
    found = open_prompts(PromptsConfig(path=path, as_chat=True, system="Be kind"), tokenizer).training.rows([0])
    assert found.texts == ["[system]Be kind<|eos|>\n[user]Hi<|eos|>\n[assistant]"]
    assert found.messages == [[turn("system", "Be kind"), turn("user", "Hi")]] and found.metadata == [{"answer": 4}]


def pair_texts(tokenizer: Any, path: str, **fields: Any) -> list[tuple[str, list[str]]]:
    pairs, _, _ = load_preferences(PreferencesConfig(path=path, held_out=0, **fields), tokenizer)
    return [learned(side, tokenizer) for side in (pairs.chosen, pairs.rejected)]


ASKED = "[user]Hi<|eos|>\n[assistant]"


@pytest.mark.parametrize("row", [
    {"prompt": [turn("user", "Hi")], "chosen": "We saw", "rejected": "I read"},
    {"prompt": [turn("user", "Hi")], "chosen": TALK[1:2], "rejected": TALK[3:]},
    {"prompt": "Hi", "chosen": TALK[1:2], "rejected": TALK[3:]},
    {"prompt": "Hi", "chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]},
    {"chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]},
])
def test_sides_as_texts_answers_or_conversations_come_to_the_same(chat, write_jsonl, row):
    assert pair_texts(chat(CLOSED), write_jsonl(row)) == [
        (ASKED + "We saw<|eos|>", ["We saw<|eos|>"]), (ASKED + "I read<|eos|>", ["I read<|eos|>"])]


def test_an_answer_that_was_cut_has_no_end(chat, write_jsonl):
    row = {"prompt": [turn("user", "Hi")], "chosen": TALK[1:2], "rejected": TALK[3:], "rejected_finished": False}
    assert [pieces for _, pieces in pair_texts(chat(CLOSED), write_jsonl(row))] == [["We saw<|eos|>"], ["I read"]]


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "Hi", "chosen": TALK[:2], "rejected": "I read"}, "must both be texts, or both messages"),
    ({"chosen": TALK[:2], "rejected": [turn("user", "Ho"), TALK[3]]}, "must be the same but for their last message"),
    ({"chosen": TALK[:1], "rejected": TALK[2:3]}, r"line 1: .*roles are \['user'\] and \['user'\]"),
    ({"prompt": "Hi", "chosen": [turn("assistant", "")], "rejected": TALK[3:]}, "column 'chosen' is empty"),
])
def test_pairs_that_do_not_pair_are_named(chat, write_jsonl, row, said):
    with pytest.raises(DataError, match=said):
        pair_texts(chat(CLOSED), write_jsonl(row))


@pytest.mark.parametrize(("config", "row"), [
    (DemonstrationsConfig, {"messages": TALK}),
    (PreferencesConfig, {"chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]}),
    (PreferencesConfig, {"prompt": TALK[:1], "chosen": "We saw", "rejected": "I read"}),
])
def test_a_tokenizer_without_a_template_is_told_once_and_by_us(chat, write_jsonl, config, row):
    path = write_jsonl(*[row] * 30)
    fields = {"messages": "messages"} if config is DemonstrationsConfig else {}
    load = load_demonstrations if config is DemonstrationsConfig else load_preferences
    with pytest.raises(ModelError) as raised:
        load(config(path=path, **fields), chat(None))
    said = str(raised.value)
    assert said.count("has no chat template; use texts, or a tokenizer with one") == 1 and "http" not in said


OTHER_END = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|pad|>\n{% endfor %}" + ASK
"""Ends each turn with another special token than the end-of-sequence token."""


def test_a_text_response_to_a_chat_prompt_ends_as_the_template_ends_a_turn(chat, write_jsonl):
    tokenizer = chat(OTHER_END)
    asked = [turn("user", "Hi")]
    texts = write_jsonl({"prompt": asked, "chosen": " We saw", "rejected": "I read"}, name="texts.jsonl")
    chats = write_jsonl({"prompt": asked, "chosen": [turn("assistant", " We saw")],
                         "rejected": [turn("assistant", "I read")]}, name="chats.jsonl")
    (one, *_), (other, *_) = (load_preferences(PreferencesConfig(path=path), tokenizer) for path in (texts, chats))
    for side in ("chosen", "rejected"):
        tokens = getattr(one, side).row(0, "tokens").tolist()
        assert tokens == getattr(other, side).row(0, "tokens").tolist()
        assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|pad|>")
    rows = write_jsonl({"prompt": asked, "response": " We saw"}, name="demonstrations.jsonl")
    told, _ = load_demonstrations(DemonstrationsConfig(path=rows, prompt="prompt"), tokenizer)
    assert told.row(0, "tokens").tolist() == one.chosen.row(0, "tokens").tolist()


@pytest.mark.parametrize("template", [OPEN + ASK, ENDLESS])
def test_where_the_template_has_no_other_end_the_sequence_s_own_remains(chat, write_jsonl, template):
    tokenizer = chat(template)
    rows = write_jsonl({"prompt": [turn("user", "Hi")], "chosen": "We saw", "rejected": "I read"})
    pairs, *_ = load_preferences(PreferencesConfig(path=rows), tokenizer)
    assert pairs.chosen.row(0, "tokens")[-1] == tokenizer.eos_token_id
    assert pairs.chosen.row(0, "tokens").tolist().count(tokenizer.eos_token_id) == (2 if template != ENDLESS else 1)


def test_a_prompt_that_ends_with_the_answer_is_refused(chat, write_jsonl):
    with pytest.raises(DataError, match=r"column 'messages' end with the assistant's answer.*without the answer"):
        open_prompts(PromptsConfig(path=write_jsonl({"messages": TALK}), column="messages"), chat(CLOSED))


def test_the_held_out_prompts_do_not_depend_on_what_the_template_and_system_add(chat, write_jsonl):
    """A template may write the date, and a run may be resumed on another day."""
    rows = write_jsonl(*({"prompt": [turn("user", f"Question {i}")]} for i in range(60)))

    def held_out(template, **fields):
        section = PromptsConfig(path=rows, held_out=0.2, **fields)
        found = open_prompts(section, chat(template)).held_out
        return [messages[-1]["content"] for messages in found.rows(range(len(found))).messages]

    first = held_out("Today is Monday. " + CLOSED)
    assert len(first) == 12
    assert held_out("Today is Tuesday. " + CLOSED) == first == held_out(CLOSED, system="Be brief.")


def test_a_response_that_ends_with_another_role_is_refused(chat, write_jsonl):
    rows = write_jsonl({"prompt": [turn("user", "Hi")], "chosen": [turn("assistant", "We saw")],
                        "rejected": [turn("assistant", "I read"), turn("user", "And?")]})
    with pytest.raises(DataError, match="'rejected' end with the role 'user'; a response ends with the assistant's"):
        load_preferences(PreferencesConfig(path=rows), chat(CLOSED))


def test_a_first_row_without_a_prompt_decides_nothing_about_the_others(chat, write_jsonl):
    errors = RowErrors(lenient=True)
    rows = write_jsonl({"prompt": None}, {"prompt": [turn("user", "Hi")]})
    blocks = list(stream_prompts(PromptsConfig(path=rows), chat(CLOSED), LoadReport(rows), errors))
    assert errors.count == 1 and sum(map(len, blocks)) == 1


@pytest.mark.parametrize("as_chat", [False, True])
def test_held_out_pairs_do_not_depend_on_the_date_nor_on_as_chat(chat, write_jsonl, as_chat):
    rows = write_jsonl(*({"prompt": f"Question {i}", "chosen": "We saw", "rejected": "I read"} for i in range(40)))

    def digests(template, **fields):
        _, found, _ = load_preferences(PreferencesConfig(path=rows, **fields), chat(template))
        return found.tolist()

    assert digests("Today is Monday. " + CLOSED, as_chat=as_chat) == digests("It is Tuesday. " + CLOSED)
