"""Rewards by rule, case by case, and what holds for any text."""

import asyncio
import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.config.rewards import ExactMatchReward, NumberReward
from rlhf_ray.errors import RewardError
from rlhf_ray.rewards.answer_matching import (
    exact_match,
    exact_match_source,
    has_number,
    normalise,
    number_match,
    number_source,
)
from rlhf_ray.rewards.judges import Verdict, same_json
from rlhf_ray.rewards.number_reading import number_in

RIGHT, WRONG, UNREADABLE = Verdict.RIGHT, Verdict.WRONG, Verdict.UNREADABLE


@pytest.mark.parametrize("text, expected", [
    ("The answer is 42.", "42"), ("42", "42"), ("about 3.14!", "3.14"), (".5 of it", "0.5"),
    ("no number", None), ("", None),
    ("1,000", "1000"), ("$1,234,567.89 in all", "1234567.89"),
    ("-5", "-5"), ("= -5", "-5"), ("\N{MINUS SIGN}7", "-7"), ("(-2)", "-2"), ("+4", "4"), ("x = - 5", "-5"),
    ("$-3", "-3"), ("-$3", "-3"), ("x=-3/4", "-0.75"), ("3/4", "0.75"), ("8 / 2", "4"),
    ("1.5e3", "1500"), ("2E-2", "0.02"), ("5 kg", "5"), ("5kg", "5"), ("50%", "50"), ("007", "7"), ("3rd", "3"),
    (r"\boxed{17}", "17"), (r"\frac{1}{4}", "0.25"), (r"-\frac{3}{2}", "-1.5"), (r"\dfrac{ 6 }{ -3 }", "-2"),
    ("1e9999", "1E+9999"), ("9" * 50, "9" * 50), ("٣", None), ("²", None), ("1\n2\n", "2"),
    (r"\boxed{1{,}000}", "1000"), (r"1{,}000", "1000"), (r"1\,000", "1000"), (r"1,\!000", "1000"),
    ("1\u202f000", "1000"), (r"\frac34", "0.75"), (r"\frac3{4}", "0.75"), (r"\tfrac{3}4", "0.75"),
    (r"\frac{1,000}{4}", "250"), ("½", "0.5"), ("x = -½", "-0.5"), (r"$\boxed{\frac{3}{4}}$.", "0.75"),
    (r"\boxed{\text{5}}", "5"), (r"\boxed{x = 5}", "5"), (r"5 \text{ cm}", "5"), (r"90^\circ", "90"), (r"5\%", "5"),
    (r"\$5", "5"), ("€5", "5"), (r"\(42\)", "42"), ("**42**", "42"), ("is **42**.", "42"), ("`42`", "42"),
    ("<answer>42</answer>", "42"), ("A: 42", "42"), ("=> 42", "42"), ("Answer:**42**", "42"),
    ("is **$42**", "42"), ("**42** apples", "42"), ("Step 1: 42", "42"), ("I have 2. 42 is right", "42"),
    ("It is 42!", "42"), (r"x = 5 \\", "5"),
    ("答案是42。", "42"), ("答案：42", "42"), ("=\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH DIGIT FIVE}", "-5"),
    ("7 × 8 = 56", "56"), ("a = 5, b = -6", "-6"), ("5 (five)", "5"), ("(so x is 5)", "5"),
    ("42 for GPT-4", "42"), ("w7 7", "7"), ("GPT-4 42", "42"), ("H2O", None),
    (r"42\text{ cm}^2", "42"), ("is 42 m^2.", "42"), (r"42 \text{ ft}^{3}", "42"), ("42ft", "42"), ("7 lbs", "7"),
    ("20 + 22 = <<20+22=42>>42", "42"), ("4 * 5 = <<4*5=20>>20 eggs.", "20"),
    (r"\begin{align*} x &= 42 \end{align*}", "42"), (r"\overline{AB} = 42", "42"), (r"\triangle ABC is 42", "42"),
])
def test_the_last_number_of_a_text(text, expected):
    found = number_in(text)
    assert found == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize("text", [
    r"\sqrt{2}", r"\sqrt2", "sqrt(2)", "√2", r"2\sqrt{3}", r"\sqrt[3]{8}", "2^{10}", "2^10", "2**10", "x^2", "10_2",
    "(3,4)", "(3, 4)", "[1, 2]", r"\{1, 2\}", r"\left(3,4\right)", "[0,1)", r"\boxed{3, 4}", "2 or 3",
    r"\boxed{5 \text{ or } 6}", "3:45", "2024-05-06", "1.2.3", "1,23", "12,345,6", "1 000", "1_000", "1'000",
    "1 1/2", r"1\frac{1}{2}", "1½", r"2\pi", r"2 \pi", "2π", "3i", "5x", "2x+3", "x + 3", "5 + 3", "3-5", "3 - 5",
    "3 -5", "2*3", r"3 \times 4", "3 x 4", r"3.5 \times 10^4", r"\log_2 8", r"\log 8", "f(4)", "3(x+1)", "(5)^2",
    "-(5)",
    r"\frac{\sqrt{3}}{2}", r"\frac{x}{2}", r"\frac12+x", "60/x", "1/2/3", "1/0", "1/0 then 2/0", "1e5x", "5!",
    "5 million", "0.333...", r"0.\overline{3}", "x > 5", r"x \geq 5", "5 < x", r"\pm 3", "minus 5",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"so 7, and 2\pi", "1, 2, 3", "1; 2", "1 2", "1, ..., 5", "3 , x", "3~100",
    "2 to 3", "2 times 3", "- 42", "Answer - 42", "is - 5", r"- \frac{1}{2}", "5 x", "2 π", "2 *(x)", "(5, x)",
    "(x, 5)", "(blue, 4)", "(4, blue)", "(100,200)", r"\{5, x\}", r"[3, \infty)", "P(X = 3)", "f(g(x) = 3)",
    r"\sum_{i = 1}^n i", r"\sqrt{x y 3}", "5 and a half", "5 ⅛", "3万", "负5", "（甲，4）", "five hundred 5",
    "7 (mod 9)", r"1\,00", "3{,}5", "1.000,50", "0.(3)", "42...", "log2 8", "3 x_1", "x-3 5",
    r"x\neq 5", r"x\geq 5", r"a\cdot 5", r"5 a\cdot b", "42m^2", "42 x^2", "the square root of 5", "cos 5", "ln 5",
])
def test_a_number_that_is_a_part_of_something_is_not_read(text):
    """Neither from a response, whatever the answer, nor from an answer."""
    for digits in re.findall(r"\d+(?:\.\d+)?", text):
        assert number_match(text, digits, None, 1e-6) is not RIGHT
    assert not has_number(text, None)


@pytest.mark.parametrize("text, expected", [
    ("2 + 2 = 4 #### 4 of 9", 4), ("#### 3 no, #### 5", 5), ("the answer is 7", None), ("####", None),
    ("#### -1,000.5", -1000.5), ("#### 42\nThat is 7", 42), ("#### **42**", 42), (r"#### \boxed{42}", 42),
])
def test_the_first_number_after_a_marker(text, expected):
    found = number_in(text, "####")
    assert (None if found is None else float(found)) == expected


@pytest.mark.parametrize("text", [
    "#### 3, 4", r"#### 2\pi", "#### 1 1/2", "#### 1 000", "#### (3,4)", r"#### \sqrt{2}", "#### 3 or 4"])
def test_the_first_number_after_a_marker_is_whole(text):
    assert number_in(text, "####").is_nan() and not has_number(text, "####")


@pytest.mark.parametrize("text, expected", [
    (r"\boxed{42}", 42), (r"\boxed{x=3}$", 3), (r"\boxed{1{,}000} yes", 1000), (r"\boxed{5}, or 6", 5),
    (r"\boxed{3, 4}", None), (r"\boxed{5 \text{ or } 6}", None), (r"\boxed{\sqrt{2}}", None),
])
def test_a_marker_may_open_a_brace(text, expected):
    found = number_in(text, r"\boxed{")
    assert found.is_nan() if expected is None else found == expected


@pytest.mark.parametrize("answer, after, wanted", [
    (42, None, 42), (4.5, None, 4.5), ("42", None, 42), ("The answer is 42.", None, 42), ("x = 42", None, 42),
    ("It costs $18.", None, 18), ("5 apples", None, 5), ("1e-07", None, 1e-07),
    ("48/2 = 24 in May.\n48+24 = 72\n#### 72", "####", 72), ("48/2 = 24 in May.\n48+24 = 72\n#### 72", None, 72),
    (r"Thus $3 + 2 = \boxed{5}$, in 2 steps.", None, 5), (r"\boxed{\frac{3}{4}}", None, 0.75), ("72", "####", 72),
    ("2 and 3", None, None), ("x = 2, y = 3", None, None), ("between 5 and 10", None, None), ("1, 2", None, None),
    ("48/2 = 24, so 72", None, None), ("6 + 7", None, None), ("5 x", None, None), ("2 π", None, None),
    (r"\boxed{(3,4)}", None, None), (r"= \boxed{\sqrt{2}} = 1.41", None, None), ("5 #### 3 or 4", "####", None),
    ("", None, None), (None, None, None), (True, None, None), ([3], None, None), (float("nan"), None, None),
])
def test_an_answer_is_one_number_or_refused(answer, after, wanted):
    assert has_number(answer, after) == (wanted is not None)
    if wanted is not None:
        assert number_match(f"#### {wanted}", answer, after, 0.0) is RIGHT


@pytest.mark.parametrize("response, answer, options, verdict", [
    ("it is 42", 42, {}, RIGHT), ("it is 42", "42", {}, RIGHT), ("it is 42.0", 42, {}, RIGHT), ("43", 42, {}, WRONG),
    ("0.3333333", "1/3", {}, RIGHT), ("0.333", "1/3", {}, WRONG), ("0.333", "1/3", {"tolerance": 1e-3}, RIGHT),
    ("1000", "1,000", {}, RIGHT), ("so 5", "2+3=5 #### 5", {"after": "####"}, UNREADABLE),
    ("#### 5", "2+3=5 #### 5", {"after": "####"}, RIGHT), ("#### 5", 5, {"after": "####"}, RIGHT),
    ("none", 42, {}, UNREADABLE), ("42", "unknown", {}, WRONG), ("2 1e9999", "1e9998", {}, WRONG),
    ("1" + "0" * 400, "1" + "0" * 400, {}, RIGHT), ("__import__('os').getpid()", 1, {}, UNREADABLE),
    ("2**10", 1024, {}, WRONG),
    ("1" * 70, "1" * 70, {}, RIGHT), ("1" * 69 + "2", "1" * 70, {}, WRONG), ("1" * 70 + ".5", "1" * 70, {}, WRONG),
    ("0." + "0" * 90 + "1", 0, {"tolerance": 0.0}, WRONG), ("1e9999", "1e-9999", {}, WRONG),
    ("0.1", 0.1, {"tolerance": 0.0}, RIGHT), ("-0", 0, {"tolerance": 0.0}, RIGHT), ("True 1", True, {}, WRONG),
])
def test_numbers_are_compared(response, answer, options, verdict):
    assert number_match(response, answer, options.get("after"), options.get("tolerance", 1e-6)) is verdict


numbers = st.one_of(st.integers(-10**12, 10**12), st.decimals(-10**6, 10**6, places=4).map(float))
words = st.lists(st.text(st.characters(categories=("Lu", "Ll")), min_size=3, max_size=9), max_size=3).map(" ".join)


@given(number=st.integers(-10**15, 10**15), before=words, after=words)
def test_a_number_among_words_is_found_however_it_is_written(number, before, after):
    for written in (str(number), f"{number:,}", f"{number}.0", f"{number * 2}/2"):
        assert number_in(f"{before} {written} {after}") == number


@given(text=st.text(max_size=200), answer=st.one_of(st.text(max_size=20), numbers, st.none()))
@settings(max_examples=300)
def test_any_text_gets_a_verdict(text, answer):
    for after in (None, "a"):
        assert number_match(text, answer, after, 0.0) in Verdict
        assert exact_match(text, str(answer), after, ["case", "space"]) in Verdict


hundredths = st.integers(0, 1000).map(lambda n: n / 100)


@given(number=st.decimals(-10**6, 10**6, places=2), gap=hundredths, tolerance=hundredths)
def test_tolerance_is_an_absolute_difference_both_ways(number, gap, tolerance):
    other, verdict = number + Decimal(str(gap)), RIGHT if gap <= tolerance else WRONG
    assert number_match(f"{other:f}", str(number), None, tolerance) is verdict
    assert number_match(f"{number:f}", str(other), None, tolerance) is verdict


@pytest.mark.timeout(120)  # a search that tries every split of such a text takes hours
def test_a_long_text_of_digits_and_signs_is_read_at_once():
    for text in ("a(" * 20_000, "a(b " * 10_000 + ")", "(*a " * 10_000, r"\frac{a}" * 10_000,
                 "1," * 20_000, "-" * 50_000, "9" * 50_000, "1/" * 20_000, r"\frac{1" * 5_000, "1e" * 20_000,
                 "," * 50_000, r"\frac " + " " * 20_000, "(" * 30_000 + "1" + ")" * 30_000, "*a" * 20_000,
                 r"\text{" * 10_000, "<a" * 20_000, "$-" * 20_000, "1 " * 20_000, r"\boxed{" * 8_000 + "1"):
        number_match(text, 1, None, 0.0)
        has_number(text, None)


@pytest.mark.parametrize("response, answer, options, verdict", [
    ("Paris", "Paris", {}, RIGHT), (" Paris\n", "Paris", {}, RIGHT), ("New  York", "New York", {}, RIGHT),
    ("paris", "Paris", {}, WRONG), ("paris", "Paris", {"ignore": ["case"]}, RIGHT), ("Paris.", "Paris", {}, WRONG),
    ("Paris.", "Paris", {"ignore": ["punctuation", "space"]}, RIGHT), (" Paris", "Paris", {"ignore": []}, WRONG),
    ("so: A", "A", {"after": ":"}, RIGHT), ("so A", "A", {"after": ":"}, UNREADABLE),
    ("so: A", "because: A", {"after": ":"}, RIGHT), ("", "", {}, WRONG),
    ("5", 5.0, {}, RIGHT), ("5.5", 5.5, {}, RIGHT), ("", "so:", {"after": ":"}, UNREADABLE),
    ("straße", "STRASSE", {"ignore": ["case"]}, RIGHT),
])
def test_exact_matches(response, answer, options, verdict):
    assert exact_match(response, answer, options.get("after"), options.get("ignore", ["space"])) is verdict


@given(text=st.text(max_size=60), ignore=st.lists(st.sampled_from(["case", "space", "punctuation"]), unique=True))
def test_normalising_twice_is_once_and_a_text_equals_itself(text, ignore):
    once = normalise(text, ignore)
    assert normalise(once, ignore) == once
    assert exact_match(text, text, None, ignore) is (RIGHT if once.strip() else WRONG)


def test_scores_and_failures_of_a_chunk(ask):
    source = number_source("sum", NumberReward(type="number", right=2.0, wrong=-1.0))
    texts = ["it is 4", "5", "6", "none", "4.0"]
    answer = asyncio.run(source.score([ask(t, i, metadata={"answer": 4}) for i, t in enumerate(texts)]))
    assert answer.scores.tolist() == [2.0, -1.0, -1.0, -1.0, 2.0] and answer.scores.dtype.name == "float32"
    assert answer.failures == 1 and answer.token_rewards is None


@pytest.mark.parametrize("metadata", [{}, {"truth": None}, {"answer": 4}])
def test_a_row_without_an_answer_is_an_error_not_a_wrong_response(ask, metadata):
    source = exact_match_source("match", ExactMatchReward(type="exact_match", answer="truth"))
    said = r"rewards\.match\.answer='truth': the prompt of epoch 0 row 3 sample 0 has no such column or an empty one"
    with pytest.raises(RewardError, match=said):
        asyncio.run(source.score([ask("a", 1, metadata={"truth": "a"}), ask("a", 3, metadata=metadata)]))


def test_an_answer_without_a_number_is_an_error_not_a_wrong_response(ask):
    source = number_source("sum", NumberReward(type="number"))
    with pytest.raises(RewardError, match=r"rewards\.sum: answer='unknown' of epoch 0 row 3 sample 0 cannot be "
                                          r"compared"):
        asyncio.run(source.score([ask("4", 1, metadata={"answer": 4}), ask("4", 3, metadata={"answer": "unknown"})]))


@pytest.mark.parametrize("answer", [" ", [], ["a"], {"a": 1}, float("nan"), float("inf")])
def test_an_answer_that_no_text_equals_is_an_error_not_a_reward(ask, answer):
    """A blank one would reward empty responses."""
    source = exact_match_source("match", ExactMatchReward(type="exact_match"))
    with pytest.raises(RewardError, match=r"rewards\.match: answer=.* cannot be compared"):
        asyncio.run(source.score([ask("", metadata={"answer": answer})]))


@pytest.mark.parametrize("a, b, same", [
    (1, 1.0, True), (1, True, False), ([1, [2]], [1, [2]], True), ([1, 2], [2, 1], False),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    ({"a": True}, {"a": 1}, False), (None, None, True), (None, False, False), ("1", 1, False), ([], {}, False),
])
def test_equal_json(a, b, same):
    assert same_json(a, b) is same and same_json(b, a) is same
