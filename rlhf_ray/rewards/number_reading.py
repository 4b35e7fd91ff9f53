r"""Numbers in texts, read whole or not at all: 2 is only a part of `\sqrt{2}`, `2x`, `(1, 2)` and `1 + 2`.

A text without its typesetting is divided into words at blanks. A word is a number if it is nothing else, apart from
punctuation around it, and if the words beside it do not make it a part of something. No expression is evaluated.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal

DIGITS = 60
"""Of a quotient, at least."""
NOT_WHOLE = Decimal("NaN")
"""What is read where a number is only a part of what stands there."""

_CHARACTERS = str.maketrans({
    **{chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)},  # full-width forms of ASCII
    **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{SMALL HYPHEN-MINUS}", "-"),
    "½": r"\frac12", "⅓": r"\frac13", "⅔": r"\frac23", "¼": r"\frac14", "¾": r"\frac34",
    "\N{FRACTION SLASH}": "/",
})
# What is only typesetting and what is written instead, in this order.
_TYPESETTING = [(re.compile(pattern), instead) for pattern, instead in (
    (r"\\\\", "; "),  # a new row of a formula
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\!", ""),
    (r"(?<=[0-9])(?:\{,\}|\\[,:; ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ""),  # thousands
    (r"(?<![\w)\]}*])\*{1,3}(?=\S)([^*\n]+)(?<=\S)\*{1,3}(?!\w)", r"\1"),  # **emphasis**
    (r"</?[A-Za-z]\w*/?>", " "),  # <answer>
    (r"(?<=[-+])\\?[$€£¥₹]", ""),
    (r"<<[^<>\n]*>>", ""),  # GSM8K's notes for a calculator
    (r"\\(?:begin|end)\{(?:align|equation|gather)(?:ed)?\*?\}", " "),
    (r"\broots? of\b", "sqrt"),
    (r"\\[()\[\],:; $#]|[$€£¥₹`&~#°]|\^ ?(?:\\circ|\{\\circ\})", " "),
    (r"\\(?:boxed|fbox|text\w*|math(?:rm|bf|it)|mbox|q?quad|displaystyle|degrees?)(?![A-Za-z])", " "),
    (r"\\(?:approx|equiv|to|implies|therefore|[Rr]ightarrow)(?![A-Za-z])|[-=]{1,2}>|[→⇒≈]", " = "),
    (r"(?:\{ ?)?(?<![A-Za-z])([mcdk]?m|in|ft|yd) ?\}? ?\^ ?(?:[23]|\{[23]\})", r"\1"),  # cm^2
    (r"\\\{", "("), (r"\\\}", ")"), (r"\\%", "%"), (r"\.\.\.", "…"),
    (r"(?<=[A-Za-z]{2}):|(?<=[\u3000-\u9fff])[:,;]", r"\g<0> "),
    (r"(?![十百千万萬亿億兆点點半负負])[\u3000-\u9fff]", " "),  # Chinese and Japanese have no blanks
    (r"(?<![<>!=])=(?![=])", " = "),
    (r"[^\S\n]+", " "),
    (r"(?<=[(\[{]) | (?=[)\]},;])", ""),  # ( 5 )
    (r"(= |[(\[{])([-+]) ", r"\1\2"),  # x = - 5
    (r"(?<=[0-9]) ([/:]) (?=[0-9])", r"\1"),  # 1 / 2
    (r"(?<=[0-9%]),? \{?(?:or|and|to|over|times|by|choose)\}? (?=[-+.0-9\\]|an? (?:half|third|quarter))", ";"),
    (r"\\[dtc]?frac(?![A-Za-z]) ?", r"\\frac"), (r"\\frac([0-9])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\}) ?([0-9])", r"\1{\2}"), (r"(\\frac\{[^{}]*\}) \{", r"\1{"),
)]
# Brackets of a function, an exponent or a factor.
_ARGUMENTS = re.compile(r"(?<=[\w^)\]}])[(\[{](?:[^()\[\]{}\n]|[(\[{][^()\[\]{}\n]*[)\]}])*[)\]}]")

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_WORD = re.compile(
    r"""(?P<opening>[(\[{"'“‘]*)(?P<sign>[-+]?)"""
    rf"(?:(?P<value>{_PLAIN}(?:[eE][-+]?[0-9]{{1,4}})?)(?:/(?P<under>{_PLAIN}))?"
    rf"|\\frac\{{(?P<top>[-+]?{_PLAIN})\}}\{{(?P<below>[-+]?{_PLAIN})\}})"
    r"""(?:%|kg|mg|km|cm|mm|ml|mph|ft|lbs?|oz|hrs?|mins?|am|pm|st|nd|rd|th)?(?P<closing>[)\]}"'”’.,:;?!]*)""")
_PUNCTUATION = "()[]{}\"'“”‘’.,:;?!"
_NAME = re.compile(r"[A-Za-z]\w*|[A-Za-z]{2,}-\w+")
"""A word that has digits and is no number: H2O, GPT-4, x_1."""
_OPERATORS = re.escape("-+*/^_×÷·⋅∙±∓√∞∪∩…<>≤≥≠\\")
_JOINING = re.compile(
    rf"(?<![A-Za-z0-9_])(?<![A-Za-z]{{2}}-)[0-9⅐-⅞]|^[{_OPERATORS}]|[{_OPERATORS}]$|\\[A-Za-z]"
    r"|^(?:[b-fi-kn-rt-zXα-ω]|[xyz]\d+)(?:_\w+)?$"  # variables, not units
    r"|^(?i:minus|negative|plus|mod|pi|sqrt\d*|log_?\d*|ln|exp|sin|cos|tan|squared|cubed|factorial"
    "|hundred|thousand|million|billion|trillion|dozen)$")


def number_in(text: str, after: str | None = None) -> Decimal | None:
    """The first number after the last occurrence of `after`, or the last number without it.

    Returns:
        None without a number, or without `after`; `NOT_WHOLE` if the number is only a part of what stands there, or is
        no number (a division by zero).
    """
    if after is None:
        return next(reversed(_numbers(text)), None)
    _, found, rest = text.rpartition(after)
    return next(iter(_numbers(rest)), None) if found else None


def only_number(text: str) -> Decimal | None:
    r"""The number of a text with one number, such as "42", "x = 42" or "It costs $42.": of its last `\boxed{}` if there
    is one, else of its last line. None without a number, or with several; `NOT_WHOLE` as in `number_in`."""
    _, boxed, inside = text.rpartition(r"\boxed{")
    numbers = _numbers(_until_closed(inside) if boxed else text.strip().rpartition("\n")[2])
    return numbers[0] if len(numbers) == 1 else None


def exact_context(*numbers: Decimal) -> Context:
    """Arithmetic in which sums and differences of these numbers are exact. What is out of range becomes infinity or
    NaN, which equal no number."""
    digits = [number.as_tuple() for number in numbers]
    highest = max(len(n.digits) + int(n.exponent) for n in digits)
    return Context(prec=max(DIGITS, highest - min(int(n.exponent) for n in digits) + 1), traps=[])


def _until_closed(text: str) -> str:
    """What stands before the brace that closes one opened before the text."""
    depth = 1
    for brace in re.finditer("[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return text


def _numbers(text: str) -> list[Decimal]:
    """What each word with digits is: a number or `NOT_WHOLE`."""
    text = text.translate(_CHARACTERS)
    for pattern, instead in _TYPESETTING:
        text = pattern.sub(instead, text)
    text = _ARGUMENTS.sub(lambda match: match[0].replace(" ", ""), text)  # f(x = 2) is one word
    numbers = []
    for line in text.split("\n"):
        words = ["", *line.split(), ""]
        for before, word, following in zip(words, words[1:], words[2:], strict=False):
            if re.search("[0-9]", word) and not _NAME.fullmatch(word.strip(_PUNCTUATION)):
                numbers.append(_number(before, word, following))
    return numbers


def _number(before: str, word: str, following: str) -> Decimal:
    """The number that a word is between two others; `NOT_WHOLE` if it is none, or a part."""
    match = _WORD.fullmatch(word)
    if match is None or _is_in_list(before, match) or _is_joined(before, match, following):
        return NOT_WHOLE
    number = Decimal((match["value"] or match["top"]).replace(",", ""))
    below = match["under"] or match["below"]
    if below is not None:
        number = exact_context(number).divide(number, Decimal(below.replace(",", "")))
    if match["sign"] == "-":
        number = number.copy_negate()
    return number if number.is_finite() else NOT_WHOLE  # of a division by zero


def _is_in_list(before: str, match: re.Match[str]) -> bool:
    """Whether a number is an element in brackets: of (5, x), (x, 5) or (100,200)."""
    opening, closing = match["opening"], match["closing"]
    depth = len(re.findall(r"[(\[{]", opening)) - len(re.findall(r"[)\]}]", closing))
    if "," in (match["value"] or "") and re.search(r"[(\[]", opening):
        return True
    return (depth > 0 and closing.endswith((",", ";"))) or (depth < 0 and before.endswith((",", ";")))


def _is_joined(before: str, match: re.Match[str], following: str) -> bool:
    """Whether a word in the same sentence makes the number beside it a part: a number, an operator, a variable."""
    if "!" in match["closing"] and not re.search("[A-Za-z]{2}", before):
        return True  # a factorial
    words = [] if before.endswith((".", ":", "?", "!", "…")) else [before]
    if not re.search("[.:?!]", match["closing"]):
        words.append(following)
    return any(_JOINING.search(word.strip(_PUNCTUATION)) for word in words)
