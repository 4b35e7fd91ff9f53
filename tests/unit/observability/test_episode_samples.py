"""Saved episodes: their columns, what a person sees of them, which are chosen, and their JSON lines."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.observability import sample_files, sample_view
from rlhf_ray.observability.conversation import call_in_words, response_of, turns_of
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.sample_choice import Choice, NumberRange, rows_of
from rlhf_ray.observability.sample_export import json_of, write_json_lines
from rlhf_ray.observability.sample_files import SampleWriter, read_samples, sample_table, steps_with_samples
from rlhf_ray.observability.sample_view import extremes, print_samples, sample_page, samples_of
from tests.unit.observability import episode_samples
from tests.unit.observability.episode_samples import (
    EPISODES,
    LOGPROBS,
    ROWS,
    SAMPLED,
    TEXTS,
    TOKENS,
    experience_of_episodes,
    save_episodes,
)
from tests.unit.observability.test_sample_view import Page, save

FILE = "samples/step_000001.parquet"
CONVERSATION = """\
system: Use the tools.
user: What do 3 teas cost?
turn 1 · segment 1 · 2 tokens · stop · reward 0
assistant: Let me look. look_up
call: look_up(item="tea")
tool: 4
turn 2 · segment 1 · 2 tokens · stop · reward 0.25
assistant: 3*4
call: not readable: '3*4' is no JSON
call: calculate(text="3*4")
user: a call was not JSON
tool: 12
turn 3 · segment 2 · 1 token · stop · reward 0.75
assistant: They cost 12.
shop: completed · items 1, parse_failures 1
reward 1 (environment 1) · advantage 0.55 · gap 0.125 · 3 turns · 5 tokens sampled, 2 observed · 2 segments · \
versions 3 to 4
"""
MASKED = """\
turn 1 · 2 tokens · length · reward 0
assistant: Let me look. look_up
call: look_up(item="tea")
shop: error_timeout (masked) · interrupted 1
the tool look_up did not answer within 60 s\\x1b[0m
reward – · advantage 0 · gap 0.125 · 1 turn · 2 tokens sampled, 1 observed · version 3
"""
TOKEN_LINES = """\
segment 1, after 3 tokens of context:
  place  token      log-prob        gap  advantage  version
      3  sampled        -0.5      0.125        0.5        3  "Let me look. "
      4  sampled       -0.25      0.125        0.5        3  "look_up"
      5  observed                                            "<tool>"
      6  observed                                            " 4"
      7  sampled        -1.5      0.125        0.5        3  "3"
      8  sampled          -2      0.125        0.5        3  "*4"
segment 2, after 5 tokens of context:
  place  token      log-prob        gap  advantage  version
      5  sampled      -0.125      0.125       0.75        4  "They cost 12."
"""


def printed(samples, **options):
    stream = io.StringIO()
    shown = [(f"number {i}", sample) for i, sample in enumerate(samples)]
    print_samples(Console(file=stream, width=100, soft_wrap=True), samples, shown, **options)
    return stream.getvalue()


def test_the_file_has_the_turns_of_each_episode_beside_its_tokens(tmp_path):
    save_episodes(tmp_path)
    first, second = pq.read_table(tmp_path / FILE).to_pylist()
    for row, episode, texts in zip((first, second), EPISODES, TEXTS.turns, strict=True):
        assert (row["environment"], row["cause"], row["use"], row["error"]) == (
            episode.environment, episode.cause, episode.use, episode.error)
        assert json.loads(row["messages"]) == episode.messages and json.loads(row["tools"]) == episode.tools
        assert dict(row["metrics"]) == episode.metrics and dict(row["events"]) == episode.events
        for saved, turn, text in zip(row["turns"], episode.turns, texts, strict=True):
            assert (saved["segment"], saved["start"], saved["stop"], saved["seed"], saved["reward"], saved["text"]) == (
                turn.row, turn.start, turn.stop, turn.seed, turn.reward, text)
            assert json.loads(saved["tool_calls"]) == turn.tool_calls
            assert json.loads(saved["messages"]) == turn.messages and saved["finish_reason"] == turn.finish_reason
    assert first["row_lengths"] == [9, 6] and first["response_mask"] == [bool(i) for i in SAMPLED[0] + SAMPLED[1]]
    assert second["score"] is None and second["reward/environment"] is None, "it has no reward"


def test_a_file_of_single_responses_has_no_columns_of_episodes(tmp_path):
    save(tmp_path / "single", 1, [0.0, 1.0])
    save_episodes(tmp_path)
    single, episodes = (set(pq.read_schema(place / FILE).names) for place in (tmp_path / "single", tmp_path))
    assert episodes - single == {"environment", "cause", "use", "error", "tools", "metrics", "events", "turns",
                                 "reward/environment"}
    assert single - episodes == {"reward/right"}


def test_texts_of_turns_are_stored_without_a_dictionary_and_other_columns_with_one(tmp_path):
    save_episodes(tmp_path)
    group = pq.ParquetFile(tmp_path / FILE).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    assert [column.path_in_schema for column in columns] == list(
        sample_files._paths(pq.read_schema(tmp_path / FILE)))
    with_dictionary = {column.path_in_schema for column in columns if "RLE_DICTIONARY" in column.encodings}
    assert {"cause", "tools", "metrics.key_value.key", "turns.list.element.finish_reason"} <= with_dictionary
    assert not {"error", "turns.list.element.text", "turns.list.element.tool_calls",
                "turns.list.element.messages"} & with_dictionary


def test_steps_of_episodes_are_rolled_and_cut_with_steps_of_single_responses(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "ROLLED", 4)
    for step in range(1, 6):
        if step % 2:
            save_episodes(tmp_path, step)
        else:
            save(tmp_path, step, [0.0, 1.0])
    alone = read_samples(tmp_path / "samples", 5)
    assert len(list((tmp_path / "samples").iterdir())) == 2
    assert read_samples(tmp_path / "samples", 3) == [
        {**row, "step": 3, "reward/right": None} for row in alone]
    assert [row["turns"] for row in read_samples(tmp_path / "samples", 2)] == [None, None]
    SampleWriter(tmp_path / "samples").cut(3)
    assert steps_with_samples(tmp_path / "samples") == [1, 2, 3]
    assert [row["turns"] for row in read_samples(tmp_path / "samples", 3)] == [row["turns"] for row in alone]
    assert samples_of(tmp_path, Choice(NumberRange(2, 2)))[0].cause == "", "a single response in a file with episodes"


def test_an_episode_is_shown_turn_by_turn(tmp_path):
    save_episodes(tmp_path)
    head, first, second = printed(samples_of(tmp_path)).split("\n\n")
    assert head == "Step 1 · 2 samples of 1 prompt · reward 1 (from 1 to 1) · completed 1, error_timeout 1"
    assert first == "number 0 · step 1, epoch 0, row 4, sample 0\n" + CONVERSATION.rstrip()
    assert second == "number 1 · step 1, epoch 0, row 4, sample 1\n" + MASKED, "its prompt was printed before"


def test_the_token_view_tells_sampled_tokens_from_observed_ones_segment_by_segment(tmp_path):
    save_episodes(tmp_path)
    assert CONVERSATION + TOKEN_LINES in printed(samples_of(tmp_path)[:1], tokens=True)


def test_long_texts_and_segments_are_shown_whole_if_asked(tmp_path, monkeypatch):
    save_episodes(tmp_path)
    monkeypatch.setattr(sample_view, "SHOWN_CHARACTERS", 10)
    monkeypatch.setattr(sample_view, "SHOWN_TOKENS", 4)
    samples = samples_of(tmp_path)[:1]
    short = printed(samples, tokens=True)
    assert "assistant: Let m … 10 characters … ok_up\n" in short
    assert '"look_up"\n        … 2 tokens …\n      7  sampled' in short and "observed   " not in short
    whole = printed(samples, full=True, tokens=True)
    assert CONVERSATION + TOKEN_LINES in whole


def test_who_speaks_has_a_colour(tmp_path):
    save_episodes(tmp_path)
    stream = io.StringIO()
    samples = samples_of(tmp_path)
    print_samples(Console(file=stream, force_terminal=True, color_system="standard"), samples,
                  [("one", samples[0]), ("two", samples[1])], tokens=True)
    text = stream.getvalue()
    for coloured in ("\x1b[32massistant: \x1b[0m", "\x1b[36mcall: \x1b[0m", "\x1b[35mtool: \x1b[0m",
                     "\x1b[32mshop: completed", "\x1b[31mshop: error_timeout", "\x1b[2m      5  observed"):
        assert coloured in text, coloured


def test_an_episode_without_a_reward_is_among_the_extremes_only_if_no_sample_has_one(tmp_path):
    save_episodes(tmp_path)
    assert [title for title, _ in extremes(samples_of(tmp_path), 2, 2)] == ["best 1"]
    save_episodes(tmp_path, 2, (math.nan, math.nan))
    without = samples_of(tmp_path)
    assert [title for title, _ in extremes(without, 1, 1)] == ["best 1", "worst 1"]
    assert printed(without).startswith("Step 2 · 2 samples of 1 prompt · completed 1, error_timeout 1\n")


@pytest.mark.parametrize("choice, found", [
    (Choice(causes=("error_timeout",)), [(1, 1), (2, 1)]),
    (Choice(causes=("error_timeout", "completed")), [(1, 0), (1, 1), (2, 0), (2, 1)]),
    (Choice(reward=NumberRange(0.5, 1)), [(1, 0)]),
    (Choice(reward=NumberRange(-math.inf, 0.25)), [(2, 0)]),
    (Choice(length=NumberRange(3, math.inf)), [(1, 0), (2, 0)]),
    (Choice(length=NumberRange(2, 2)), [(1, 1), (2, 1)]),
    (Choice(steps=NumberRange(1, 1), length=NumberRange(5, 5)), [(1, 0)]),
    (Choice(prompt="3 TEAS", causes=("completed",), reward=NumberRange(0.0, 0.5), length=NumberRange(1, 9)), [(2, 0)]),
    (Choice(NumberRange(1, 2)), [(1, 0), (1, 1), (2, 0), (2, 1)]),
    (Choice(), [(2, 0), (2, 1)]),
])
def test_samples_are_chosen_by_all_conditions_together(tmp_path, choice, found):
    save_episodes(tmp_path, 1)
    save_episodes(tmp_path, 2, (0.25, np.nan))
    assert [(sample.step, sample.key[2]) for sample in samples_of(tmp_path, choice)] == found


def test_single_responses_are_chosen_by_reward_and_length(tmp_path):
    save(tmp_path, 1, [0.0, 1.0, 2.0, 3.0])
    assert [sample.score for sample in samples_of(tmp_path, Choice(reward=NumberRange(1, 2)))] == [1, 2]
    assert len(samples_of(tmp_path, Choice(length=NumberRange(3, 3)))) == 4
    with pytest.raises(DataError, match="no sample of 1 step in .* has a length in 4.."):
        samples_of(tmp_path, Choice(length=NumberRange(4, math.inf)))
    with pytest.raises(DataError, match="has the cause completed; step 1 has single responses, which have no cause"):
        samples_of(tmp_path, Choice(causes=("completed",)))


def test_if_no_episode_has_a_cause_those_of_the_newest_step_are_named(tmp_path):
    save_episodes(tmp_path)
    with pytest.raises(DataError, match="no sample of step 1 in .* has the cause error_parse and a reward in 0.5..; "
                                        "step 1 has the causes completed, error_timeout"):
        samples_of(tmp_path, Choice(NumberRange(1, 1), causes=("error_parse",), reward=NumberRange(0.5, math.inf)))


@pytest.mark.parametrize("text, low, high, again", [
    ("1", 1, 1, "1"), ("0.5..", 0.5, math.inf, "0.5.."), ("..0.5", -math.inf, 0.5, "..0.5"), ("-1..2", -1, 2, "-1..2"),
    ("..", -math.inf, math.inf, ".."), ("1e-3..1.", 0.001, 1, "0.001..1")])
def test_ranges_are_read(text, low, high, again):
    assert NumberRange.parse(text) == (low, high) and str(NumberRange(low, high)) == again


@pytest.mark.parametrize("text", ["", " ", "a", "2..1", "1..2..3", "nan", "1-2", "nan.."])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match="is no range: write a number, LOW..HIGH"):
        NumberRange.parse(text)


def test_a_range_holds_its_ends_and_no_missing_number():
    within = NumberRange(0, 1)
    assert within.has(0) and within.has(1) and not within.has(1.5)
    assert not NumberRange(-math.inf, math.inf).has(None) and not NumberRange(-math.inf, math.inf).has(math.nan)


def exported(run):
    """Samples of all steps."""
    file = io.StringIO()
    count = write_json_lines(rows_of(run, Choice(NumberRange.parse(".."))), file)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert count == len(lines)
    return lines


def test_the_export_has_all_that_the_file_has(tmp_path):
    """Read again by pyarrow alone."""
    save_episodes(tmp_path)
    lines = exported(tmp_path)
    for line, saved in zip(lines, pq.read_table(tmp_path / FILE).to_pylist(), strict=True):
        assert line["key"] == {name: saved[name] for name in ("epoch", "row", "sample")}
        for name in ("step", "environment", "cause", "use", "error", "prompt", "response", "finish_reason", "score",
                     "kl", "gold"):
            assert line[name] == saved[name], name
        assert line["rewards"] == {"environment": saved["reward/environment"]}
        assert line["tools"] == json.loads(saved["tools"])
        assert line["metrics"] == dict(saved["metrics"]) and line["events"] == dict(saved["events"])
        decoded = ("tool_calls", "messages", "opens")
        assert line["turns"] == [{**turn, **{name: json.loads(turn[name]) for name in decoded}}
                                 for turn in saved["turns"]]
        assert [len(segment["token_ids"]) for segment in line["segments"]] == saved["row_lengths"]
        for name in ("token_ids", "token_texts", "response_mask", "behaviour_logprobs", "old_logprobs", "advantages",
                     "versions"):
            assert [value for segment in line["segments"] for value in segment[name]] == saved[name], name
        assert all(segment["reference_logprobs"] is None for segment in line["segments"])
    assert [segment["token_ids"] for line in lines for segment in line["segments"]] == ROWS
    sampled = [value for line in lines for segment in line["segments"]
               for value, own in zip(segment["behaviour_logprobs"], segment["response_mask"], strict=True) if own]
    assert sampled == LOGPROBS and [line["length"] for line in lines] == [5, 2]
    assert [line["score"] for line in lines] == [1.0, None], "JSON has no NaN"
    assert lines[0]["advantage"] == pytest.approx((4 * 0.5 + 0.75) / 5)


def test_the_exported_conversation_has_openais_form(tmp_path):
    save_episodes(tmp_path)
    first, second = exported(tmp_path)
    calls = [("call_1_1", "look_up", {"item": "tea"}), ("call_2_1", "calculate", {"text": "3*4"})]
    tools = [{"tool_calls": [{"id": name, "type": "function",
                              "function": {"name": function, "arguments": json.dumps(arguments)}}]}
             for name, function, arguments in calls]
    assert first["messages"] == [
        {"role": "system", "content": "Use the tools."}, {"role": "user", "content": "What do 3 teas cost?"},
        {"role": "assistant", "content": "Let me look. look_up", **tools[0]},
        {"role": "tool", "name": "look_up", "content": "4", "tool_call_id": "call_1_1"},
        {"role": "assistant", "content": "3*4", **tools[1]},
        {"role": "user", "content": "a call was not JSON"},
        {"role": "tool", "content": "12", "tool_call_id": "call_2_1"},
        {"role": "assistant", "content": "They cost 12."}]
    assert second["messages"][-1]["tool_calls"][0]["function"]["name"] == "look_up"


@pytest.mark.parametrize("of_call, of_answer", [({"id": "c1"}, {"tool_call_id": "c1"}), ({}, {"tool_call_id": "c1"}),
                                                ({"id": "c1"}, {})])
def test_a_call_and_its_answer_have_the_id_that_one_of_them_has(tmp_path, of_call, of_answer):
    save_episodes(tmp_path)
    row = read_samples(tmp_path / "samples", 1)[1]
    row["turns"][0]["tool_calls"] = json.dumps([{"name": "f", "arguments": "{}", **of_call}, {"name": "g"}])
    row["turns"][0]["messages"] = json.dumps([{"role": "tool", "content": "", **of_answer}])
    *_, said, answer = json_of(row)["messages"]
    assert said["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "call_1_2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]
    assert answer == {"role": "tool", "content": "", "tool_call_id": "c1"}


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    save_episodes(tmp_path)
    row = read_samples(tmp_path / "samples", 1)[0]
    row["turns"][1]["reward"] = math.nan
    file = io.StringIO()
    write_json_lines([{**row, "metrics": [("items", math.inf)], "kl": math.nan}], file)
    line = json.loads(file.getvalue())
    assert (line["kl"], line["metrics"], line["turns"][1]["reward"]) == (None, {"items": None}, None)


def test_a_single_response_is_exported_as_one_turn(tmp_path):
    save(tmp_path, 1, [0.0, 1.0], ["yes", "no"], chat=True)
    save(tmp_path, 2, [0.5, 1.0], ["yes", "no"])
    chat, _, text, _ = exported(tmp_path)
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant"]
    assert chat["messages"][-1] == {"role": "assistant", "content": "yes"}
    assert text["messages"] == [{"role": "user", "content": text["prompt"]}, {"role": "assistant", "content": "yes"}]
    assert text["turns"] == [{"segment": 0, "start": 1, "stop": 5, "seed": None, "finish_reason": "length",
                              "reward": 0.5, "text": "yes", "tool_calls": [], "messages": [], "opens": []}]
    assert (text["cause"], text["metrics"], text["tools"], text["rewards"]) == (None, None, None, {"right": 0.25})
    assert [segment["versions"] for segment in text["segments"]] == [[-1, 3, 3, -1, 4]]


def test_the_page_shows_turns_and_filters_by_cause(tmp_path):
    save_episodes(tmp_path)
    text = sample_page(tmp_path, samples_of(tmp_path))
    found = Page(text)
    assert [side["data-reason"] for side in found.of("article")] == ["completed", "error_timeout"]
    assert text.count("<option>completed") == 1 and "Turn 3 · segment 2 · 1 token" in text
    assert "<b>call</b>look_up(item=&#34;tea&#34;)" in text and "did not answer within 60 s\\x1b[0m" in text
    assert "5 tokens sampled, 2 observed" in text, "also without the tokens, which are drawn from the strips"
    (_, strips) = json.loads(found.scripts[0])
    *_, versions, logprobs, starts = strips[0]
    assert (versions, starts) == ([3, 3, None, None, 3, 3, 4], [0, 6])
    assert logprobs == [-0.5, -0.25, None, None, -1.5, -2, -0.125]


def test_what_an_agent_s_later_conversation_began_with_is_shown_and_exported(tmp_path, monkeypatch):
    whole = EPISODES[0]
    opens = [{"role": "system", "content": "In short."}, {"role": "user", "content": "Tea is 4. Three?"}]
    changed = replace(whole, turns=[*whole.turns[:2], replace(whole.turns[2], opens=opens)])
    monkeypatch.setattr(episode_samples, "EPISODES", [changed, EPISODES[1]])
    save_episodes(tmp_path)
    console = Console(file=io.StringIO(), width=200)
    found = samples_of(tmp_path)
    print_samples(console, found, [("one", found[0])])
    shown = console.file.getvalue().splitlines()
    at = shown.index("system: In short.")
    assert shown[at - 1].startswith("turn 3 · segment 2") and shown[at + 1] == "user: Tea is 4. Three?"
    assert shown[at + 2] == "assistant: They cost 12."
    assert "Tea is 4. Three?" in sample_page(tmp_path, found)
    messages = json_of(pq.read_table(tmp_path / FILE).to_pylist()[0])["messages"]
    assert messages[-3:] == [*opens, {"role": "assistant", "content": "They cost 12."}]


def test_the_report_shows_the_conversation_of_an_episode(tmp_path):
    (tmp_path / "config.yaml").write_text("{}\n")
    save_episodes(tmp_path)
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<b>call</b>calculate(text=&#34;3*4&#34;)" in text and "<b>tool</b>12" in text
    assert "error_timeout</span>" in text and "nan" not in text.partition("Rollouts along the way")[2]


@pytest.mark.parametrize("call, words", [
    ({"name": "f", "arguments": {"a": 1, "b": "ä"}}, 'f(a=1, b="ä")'), ({"name": "f"}, "f()"),
    ({"name": "f", "arguments": '{"a": 1}'}, 'f({"a": 1})'), ({"error": "no JSON"}, "not readable: no JSON"),
    ({"function": {"name": "f", "arguments": {}}, "type": "function"}, "f()")])
def test_calls_in_words(call, words):
    assert call_in_words(call) == words


def test_messages_with_calls_or_without_text_are_turns():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "content": [{"type": "text", "text": "é"}]}]
    assert turns_of({"messages": messages}) == [
        ("assistant", ""), ("call", "f()"), ("tool", '[{"type": "text", "text": "é"}]')]
    assert response_of({"response": "\x1b"}) == [("response", "\\x1b")]


def test_tokens_of_one_text_share_its_entry(tmp_path):
    """With an entry twice in the dictionary, what pyarrow writes after it is memory of the process: other bytes in
    each, and perhaps a secret."""
    alike = {token: "\ufffd" if token % 2 else text for token, text in TOKENS.items()}
    table = sample_table(1, experience_of_episodes(), TEXTS._replace(tokens=alike),
                         {"score": None, "reward/environment": None, "kl": None, "gold": None})
    column = table["token_texts"].combine_chunks()
    entries = column.values.dictionary.to_pylist()
    assert sorted(entries) == sorted({alike[token] for row in ROWS for token in row})
    SampleWriter(tmp_path).write(1, table)
    read = [row["token_texts"] for row in read_samples(tmp_path, 1)]
    assert read == [[alike[token] for row in ROWS[:2] for token in row], [alike[token] for token in ROWS[2]]]
