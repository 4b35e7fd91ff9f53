"""Saved samples as a person sees them: which, in the terminal, and as a page out of which no text can break."""

import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from rlhf_ray.errors import DataError
from rlhf_ray.observability import sample_choice, sample_view
from rlhf_ray.observability.conversation import escaped, turns_of
from rlhf_ray.observability.sample_choice import Choice, NumberRange
from rlhf_ray.observability.sample_files import SampleTexts, SampleWriter, sample_table
from rlhf_ray.observability.sample_view import extremes, print_samples, sample_page, samples_of
from rlhf_ray.records import Experience, SampleKey, offsets_of

EVIL = '</script><script>alert("x")</script><img src=http://evil.example/x>'
CHAT = [{"role": "system", "content": f"Be kind. {EVIL}"}, {"role": "user", "content": "half \ud83d of \x1b[31mred"}]


def experience_of(keys):
    """Five tokens for each key: one of a prompt, then sampled, sampled, inserted, sampled. Log-probabilities of the
    learner are -1, those of the generator -1.25 at the first sampled token and -1 at the others."""
    count = len(keys)
    mask = np.tile([False, True, True, False, True], count)

    def column(values):
        return np.tile(np.array(values, np.float32), count)

    return Experience(
        offsets_of([5] * count), np.tile(np.arange(2, 7, dtype=np.int32), count), mask,
        column([0, -1.25, -1, 0, -1]), column([0, -1, -1, 0, -1]), None, None, column([0, 0.5, 0.5, 0, 2]),
        column([0] * 5), keys, versions=np.tile(np.array([-1, 3, 3, -1, 4], np.int32), count),
        finish_reasons=["stop", "length"] * count if count == 1 else ["stop" if i % 2 else "length"
                                                                      for i in range(count)])


def save(run, step, scores, responses=None, chat=False, first_row=0):
    """Samples of a step, two for each prompt."""
    keys = [SampleKey(0, first_row + i // 2, i % 2) for i in range(len(scores))]
    texts = SampleTexts([f"question {key.row} {EVIL}" for key in keys],
                        [json.dumps(CHAT) if chat else None] * len(keys),
                        responses or [f"answer {i}" for i in range(len(keys))],
                        {2: "q", 3: " a", 4: EVIL, 5: "\x1b[0m", 6: "�"})
    numbers = {"score": np.array(scores, np.float32), "reward/right": np.array(scores, np.float32) / 2,
               "kl": None, "gold": None}
    SampleWriter(run / "samples").write(step, sample_table(step, experience_of(keys), texts, numbers))


def printed(samples, shown):
    stream = io.StringIO()
    print_samples(Console(file=stream, width=100, soft_wrap=True), samples, shown)
    return stream.getvalue()


def test_the_newest_step_is_shown_unless_another_one_is_asked_for(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, [0.0, 1.0, 2.0, 3.0])
    assert {sample.step for sample in samples_of(tmp_path)} == {2}
    first = samples_of(tmp_path, Choice(NumberRange(1, 1)))
    assert [sample.key for sample in first] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    with pytest.raises(DataError, match="no samples of step 7; it has those of 2 steps from 1 to 2"):
        samples_of(tmp_path, Choice(NumberRange(7, 7)))


def test_a_run_without_samples_says_why_there_may_be_none(tmp_path):
    with pytest.raises(DataError, match="no samples: no step is finished yet, .* logging.samples=off"):
        samples_of(tmp_path)


def test_numbers_of_a_sample_by_hand(tmp_path):
    save(tmp_path, 5, [0.5, 1.0])
    first, second = samples_of(tmp_path)
    assert (first.score, first.parts, first.length, first.versions) == (0.5, {"right": 0.25}, 3, (3, 4))
    assert first.advantage == pytest.approx(1.0) and first.gap == pytest.approx(0.25 / 3)
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert [(token.text, token.gap, token.advantage, token.version) for token in first.tokens] == [
        (" a", -0.25, 0.5, 3), (EVIL, 0.0, 0.5, 3), ("\\x1b[0m", None, None, None), ("�", 0.0, 2.0, 4)]


def test_prompts_are_found_by_their_text_in_the_newest_steps_that_have_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_choice, "STEPS_SEARCHED", 2)
    for step, row in ((1, 0), (2, 8), (3, 0), (4, 0), (5, 8)):
        save(tmp_path, step, [0.0, 1.0], first_row=row)
    assert [(sample.step, sample.key[1]) for sample in samples_of(tmp_path, Choice(prompt="QUESTION 0"))] == [
        (3, 0), (3, 0), (4, 0), (4, 0)]
    assert {sample.step for sample in samples_of(tmp_path, Choice(NumberRange(1, 1), "question 0"))} == {1}
    with pytest.raises(DataError, match="no sample of 5 steps in .* has a prompt that contains 'question 9'"):
        samples_of(tmp_path, Choice(prompt="question 9"))


def test_a_message_of_a_conversation_is_found_too(tmp_path):
    save(tmp_path, 1, [0.0, 1.0], chat=True)
    assert len(samples_of(tmp_path, Choice(prompt="be KIND"))) == 2


@pytest.mark.parametrize("worst, best, titles, scores", [
    (1, 2, ["best 1", "best 2", "worst 1"], [3, 2, 0]), (2, 0, ["worst 1", "worst 2"], [0, 1]), (0, 0, [], []),
    (9, 3, ["best 1", "best 2", "best 3", "worst 1"], [3, 2, 1, 0]),
])
def test_the_best_and_the_worst_are_by_reward_and_no_sample_is_both(tmp_path, worst, best, titles, scores):
    save(tmp_path, 1, [2.0, 0.0, 3.0, 1.0])
    shown = extremes(samples_of(tmp_path), worst, best)
    assert [title for title, _ in shown] == titles and [sample.score for _, sample in shown] == scores


def test_the_terminal_shows_conversations_and_no_control_characters(tmp_path):
    save(tmp_path, 1, [0.0, 1.0], ["one\x1b]0;title\x07", "two\nlines\t[bold]x[/bold]"], chat=True)
    samples = samples_of(tmp_path)
    text = printed(samples, [("first", samples[0]), ("second", samples[1])])
    assert "Step 1 · 2 samples of 1 prompt · reward 0.5 (from 0 to 1)" in text
    assert "system: Be kind." in text and "user: half \\ud83d of \\x1b[31mred" in text
    assert "response: one\\x1b]0;title\\x07" in text and "[bold]x[/bold]" in text
    assert "reward 0 (right 0) · advantage 1 · gap 0.08333 · 3 tokens · length · versions 3 to 4" in text
    assert "\x1b" not in text and text.count("Be kind.") == 1, "a prompt is printed once for its samples"


def test_long_texts_are_shortened_in_the_terminal_alone(tmp_path):
    save(tmp_path, 1, [0.0, 1.0], ["x" * 5000, "y"])
    samples = samples_of(tmp_path)
    assert "x … 3,500 characters … x" in printed(samples, [("first", samples[0])])
    assert "x" * 5000 in sample_page(tmp_path, samples)


class Page(HTMLParser):
    """The elements of a page, and the contents of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._in_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data

    def of(self, tag, **attributes):
        return [found for name, found in self.tags if name == tag and attributes.items() <= found.items()]


@pytest.mark.parametrize("chat", [False, True])
def test_nothing_in_a_text_breaks_out_of_the_page(tmp_path, chat):
    save(tmp_path, 1, [0.0, 1.0, 2.0, 3.0], [EVIL, "\x1b[31m", "\x00", "fine & dandy"], chat=chat)
    text = sample_page(tmp_path, samples_of(tmp_path))
    found = Page(text)
    text.encode()  # no halves of surrogate pairs
    assert EVIL not in text and "\x1b" not in text and "\x00" not in text
    assert not found.of("img") and len(found.scripts) == 2, "its own data and its own program"
    assert not any(value.startswith("http") for _, attributes in found.tags
                   for value in attributes.values() if isinstance(value, str))
    assert "fine &amp; dandy" in text and "\\x1b[31m" in text


def test_the_page_has_a_card_for_each_prompt_with_its_samples_side_by_side(tmp_path):
    save(tmp_path, 1, [0.0, 1.0, 2.0, 3.0])
    found = Page(sample_page(tmp_path, samples_of(tmp_path)))
    assert [card["data-order"] for card in found.of("section")] == ["0", "1"]
    assert [float(side["data-score"]) for side in found.of("article")] == [0, 1, 2, 3]
    assert [button["data-strip"] for button in found.of("button") if "data-strip" in button] == ["0", "1", "2", "3"]
    texts, strips = json.loads(found.scripts[0])
    places, gaps, advantages, versions, logprobs, starts = strips[2]
    assert [texts[place] for place in places] == [" a", EVIL, "\\x1b[0m", "�"]
    assert (gaps, advantages, versions) == ([-0.25, 0, None, 0], [0.5, 0.5, None, 2], [3, 3, None, 4])
    assert (logprobs, starts) == ([-1.25, -1, None, -1], [0])


def test_steps_can_be_chosen_where_the_page_has_several(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, [0.0, 1.0])
    found = Page(sample_page(tmp_path, samples_of(tmp_path, Choice(prompt="question"))))
    assert [button["data-step"] for button in found.of("button") if "data-step" in button] == ["all", "1", "2"]


def test_a_page_of_many_samples_has_the_extremes_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_view, "PAGE_TOKENS", 16)  # two prompts of two samples with four tokens
    save(tmp_path, 1, [0.5, 0.5, 0.5, 9.0, 0.5, 0.5, -9.0, 0.5])
    text = sample_page(tmp_path, samples_of(tmp_path))
    assert [float(side["data-score"]) for side in Page(text).of("article")] == [0.5, 9, -9, 0.5]
    assert "The page has 2 of 4 prompts" in text


def test_prompts_are_turns():
    assert turns_of({"prompt": "p"}) == [("prompt", "p")]
    assert turns_of({"prompt": "p", "messages": None}) == [("prompt", "p")]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    assert turns_of({"prompt": "p", "messages": messages}) == [("user", "a"), ("assistant", "")]
    assert turns_of({"prompt": "p", "messages": json.dumps(messages)}) == [("user", "a"), ("assistant", "")]


def test_only_line_breaks_and_tabs_are_no_escapes():
    assert escaped("ä\n\t�\x07\x1b\x7f\u202e\ud83d😀") == "ä\n\t�\\x07\\x1b\\x7f\\u202e\\ud83d😀"
