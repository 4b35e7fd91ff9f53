r"""Numbers in texts, read whole or not at all: 2 is only a part of `\sqrt{2}`, `2x`, `(1,2)` and `1.2.2`.

Numbers are decimals with any number of digits, and quotients of two. No expression is evaluated: where a number belongs
to a sum, a power, a pair or a root, there is none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Context, Decimal

DIGITS = 60
"""Of a quotient, at least."""
NOT_WHOLE = Decimal("NaN")
"""What is read where a number is only a part of what stands there."""
LOOK = 60
"""How many characters before and after a number are looked at, apart from brackets."""
DEPTH = 8
"""How many brackets around a number are looked at."""

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
_NUMBER = re.compile(
    rf"\\frac\s*(?:{{\s*(?P<top>-?{_PLAIN})\s*}}|(?P<top_digit>[0-9]))"
    rf"\s*(?:{{\s*(?P<below>-?{_PLAIN})\s*}}|(?P<below_digit>[0-9]))"
    rf"|(?P<value>{_PLAIN})(?:[eE](?P<power>[-+]?[0-9]{{1,4}})(?!\w)| ?/ ?(?P<under>{_PLAIN}))?",
    re.ASCII)

# What is only typesetting, and how it is written instead.
_TYPESETTING = [(re.compile(pattern), instead) for pattern, instead in (
    ("[\N{MINUS SIGN}\N{EN DASH}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}]", "-"),
    (r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\!", ""),
    (r"(?<=[0-9])\{([,.])\}(?=[0-9])", r"\1"),  # 1{,}000
    ("(?<=[0-9])(?:\\\\[,;: ]|~|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ","),  # thousands by a narrow blank
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"</?[A-Za-z][\w-]*(?:\s+[\w-]+=[^<>]{0,80})?\s?/?>", " "),  # <answer>42</answer>
    (r"(?<=[-+])\\?[$€£¥₹](?=[0-9.])", ""),
    (r"\\\\", "\n"),
    (r"\\[()\[\]$,;: ]|[$€£¥₹`&~°]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|"
     r"\\(?:degrees?|q?quad|displaystyle|approx|to|implies|therefore|item|[Rr]ightarrow|boxed(?!\s*\{))(?![a-zA-Z])",
     " "),
    (r"\\%", "%"),
    (r"(?<![\w)\]}*.])\*{1,3}(?=[^\s*])|(?<=[^\s*])\*{1,3}(?![\w(\\*.])", ""),  # **emphasis**
)]
_FRACTIONS = re.compile("(?<![0-9])[¼-¾⅐-⅞]")

_LETTER = r"[A-Za-z\u0370-\u03ff]"
_VARIABLE = rf"(?<!{_LETTER}){_LETTER}"
"""One letter; at its end."""
_OPERAND = rf"(?:[0-9)\]}}%!]|{_VARIABLE})"
_BEFORE = re.compile(
    rf"(?:[0-9)\]}}][,.:;'/]|{_VARIABLE}[,;]"  # a pair, a ratio, a date
    r"|[\^_√∛∜±∓/][ \t]*|[)\]}]"
    rf"|{_OPERAND}[ \t]*(?:\*\*?|[×÷·⋅∙])[ \t]*|[0-9][ \t]*[xX][ \t]*|_(?:\w|\{{[^{{}}]*\}})[ \t]+"
    r"|\\[A-Za-z]+[ \t]*"  # any other command: \sqrt, \log, \pm, \geq, ...
    r"|(?:(?<![-=])>|<|[<>!]=|[≤≥≠])[ \t]*"
    r"|[0-9%][ \t]+(?:or|and)[ \t]+|(?<![A-Za-z])(?:minus|negative|plus)[ \t]+)\Z")
"""Ends of the text before a number of which it is only a part."""
_ATTACHED = r"(?:kg|mg|lbs?|oz|km|cm|mm|mi|ft|in|ml|mL|ms|mins?|hrs?|am|pm|st|nd|rd|th|mph)(?![A-Za-z0-9^_(])"
_AFTER = re.compile(
    rf"(?!{_ATTACHED})(?:{_LETTER}|[_(\[{{√²³¹⁰⁴-⁹₀-₉¼-¾⅐-⅞])"
    rf"|[,.:;'][0-9]|[,;](?:{_LETTER}(?!{_LETTER})|\\[a-z])"
    r"|[ \t]*(?:[\^×÷·⋅∙±∓√∞]|\\[A-Za-z]+|[<>≤≥≠]|!=)|[ \t]*π(?!\w)"
    rf"|[ \t]*/[ \t]*(?:[0-9.(\\]|{_LETTER}(?!{_LETTER}))"
    rf"|[-+*](?:[0-9.(\\√]|{_LETTER}(?!{_LETTER}))|[ \t]+[-+*][ \t]*(?:[0-9.(\\√]|(?![aAI] ){_LETTER}(?!{_LETTER}))"
    r"|[ \t]*(?:hundred|thousand|million|billion|trillion|dozen|pi|sqrt|squared|cubed|factorial)(?![A-Za-z])"
    r"|[ \t]*(?:[,;]|[ \t](?:or|and)[ \t])[ \t]*[-+]?[0-9.\\]"
    r"|[ \t]+(?:[0-9]{3}(?![0-9])|[0-9]+/[0-9])")
"""Beginnings of the text after a number of which it is only a part."""
_NAME = re.compile(rf"(?<!\\)(?<!{_LETTER})(?:{_LETTER}+|{_LETTER}{{2,}}-)\Z")
_SIGN = re.compile(r"[-+][ \t]*\Z")


def number_in(text: str, after: str | None = None) -> Decimal | None:
    """The first number after the last occurrence of `after`, or the last number without it.

    Returns:
        None without a number, or without `after`; `NOT_WHOLE` if the number is only a part of what stands there, or is
        no number (a division by zero).
    """
    if after is not None:
        _, found, text = text.rpartition(after)
        if not found:
            return None
    text = _typeset(text)
    candidates = list(_candidates(text))
    if not candidates:
        return None
    return _whole(text, candidates[-1 if after is None else 0], inside=after is not None)


def only_number(text: str) -> Decimal | None:
    r"""The number of a text with one number, such as "42", "x = 42" or "It costs $42.": of its last `\boxed{}` if there
    is one, else of its last line. None without a number, or with several; `NOT_WHOLE` as in `number_in`."""
    text = _typeset(text)
    start = text.rfind(r"\boxed{") + len(r"\boxed{")
    if start >= len(r"\boxed{"):
        text = text[start : _closing(text, start)]
    else:
        text = text.strip().rpartition("\n")[2]
    candidates = list(_candidates(text))
    if len(candidates) != 1:
        return None
    variable = re.match(rf"[ \t]+{_LETTER}(?!{_LETTER})", text[candidates[0].end() :])
    return NOT_WHOLE if variable else _whole(text, candidates[0])


def exact_context(*numbers: Decimal) -> Context:
    """Arithmetic in which sums and differences of these numbers are exact. What is out of range becomes infinity or
    NaN, which equal no number."""
    digits = [number.as_tuple() for number in numbers]
    highest = max(len(n.digits) + int(n.exponent) for n in digits)
    return Context(prec=max(DIGITS, highest - min(int(n.exponent) for n in digits) + 1), traps=[])


def _typeset(text: str) -> str:
    """The text without typesetting: blanks for thousands, text in formulas, currencies, degrees, emphasis."""
    for pattern, instead in _TYPESETTING:
        text = pattern.sub(instead, text)
    return _FRACTIONS.sub(lambda one: unicodedata.normalize("NFKC", one[0]).replace("\N{FRACTION SLASH}", "/"), text)


def _candidates(text: str) -> Iterator[re.Match[str]]:
    """Numbers, apart from digits of names: H2O, GPT-4, x_1."""
    for match in _NUMBER.finditer(text):
        if not _NAME.search(text[max(0, match.start() - LOOK) : match.start()]):
            yield match


def _whole(text: str, match: re.Match[str], inside: bool = False) -> Decimal:
    """The number of a candidate, with its sign; `NOT_WHOLE` if it is only a part.

    Args:
        inside: the text begins inside brackets, perhaps.
    """
    before, after = text[max(0, match.start() - LOOK) : match.start()], text[match.end() : match.end() + LOOK]
    negative = False
    if sign := _SIGN.search(before):
        minus, before = sign[0], before[: sign.start()]
        kind = _sign_kind(before, spaced=len(minus) > 1)
        if kind == "operator":
            return NOT_WHOLE
        negative = kind == "sign" and minus[0] == "-"
    if _BEFORE.search(before) or _AFTER.match(after) or _joins(text, match, before, after):
        return NOT_WHOLE
    start = match.start() - len(sign[0] if sign else "")
    if _is_part_of_brackets(text, start, match.end(), inside):
        return NOT_WHOLE
    return _value(match, negative)


def _sign_kind(before: str, spaced: bool) -> str:
    """Whether a plus or minus before a number is its "sign", an "operator" or a "dash", by the text before it."""
    left = before.rstrip(" \t")
    adjacent = left == before
    if not left or left.endswith("\n"):
        return "dash" if spaced else "sign"  # of a list
    if re.search(rf"(?:[0-9)\]}}%!]|{_VARIABLE}|[-+*^_√±∓:])\Z", left):
        number = left[-1] in "0123456789}"
        return "operator" if spaced or (adjacent and left[-1] != ":") or number else "sign"
    if spaced:
        return "sign" if left[-1] in "=({[" else "dash"
    return "sign"


def _joins(text: str, match: re.Match[str], before: str, after: str) -> bool:
    """Whether a number belongs to another one beside it (1 000, 1 1/2), goes on (0.33...) or is followed by an
    exclamation mark without words, a factorial."""
    is_quotient = match["value"] is None or match["under"] is not None
    if is_quotient and re.search(r"[0-9][ \t]*\Z", before):
        return True
    if re.fullmatch("[0-9]{3}", match[0]) and re.search(r"(?<![0-9.,])[0-9]{1,3} \Z", before):
        return True
    if "." in match[0] and re.match(r"\.\.|…", after):
        return True
    line = before.rpartition("\n")[2] + after.partition("\n")[0]
    return after.startswith("!") and not re.search(r"[^\W\d_]{2}", line)


def _is_part_of_brackets(text: str, start: int, end: int, inside: bool) -> bool:
    """Whether the brackets around a number hold more than a number and words, or belong to a larger expression."""
    line = text.rfind("\n", 0, start) + 1
    for _ in range(DEPTH):
        opening, closing = _opening(text, start, line), _closing(text, end)
        if opening < line and not (inside and line == 0 and text[closing : closing + 1] == "}"):
            return False
        around = text[max(line, opening + 1) : start] + " " + text[end:closing]
        if re.search("[,;|]", around) or ((opening < line or text[opening] == "{") and re.search("[0-9]", around)):
            return True
        if opening < line:
            return False
        head = text[max(line, opening - LOOK) : opening]
        if text[opening] == "{":
            head = re.sub(r"\\f?boxed[ \t]*\Z", "", head)
        if re.search(rf"(?:\\[A-Za-z]+[ \t]*|[\w)\]}}^√]|[-+*/×÷·⋅]|{_OPERAND}[ \t]*[-+*/×÷·⋅][ \t]*)\Z", head):
            return True
        if _AFTER.match(text[closing + 1 : closing + 1 + LOOK]):
            return True
        start, end = opening, closing + 1
    return True


def _opening(text: str, position: int, line: int) -> int:
    """Where the innermost bracket around a position opens in its line, or -1."""
    depth = 0
    for i in range(position - 1, line - 1, -1):
        depth += (text[i] in ")]}") - (text[i] in "([{")
        if depth < 0:
            return i
    return -1


def _closing(text: str, position: int) -> int:
    """Where the innermost bracket around a position closes in its line, or the line's end."""
    depth = 0
    for i in range(position, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth < 0 or text[i] == "\n":
            return i
    return len(text)


def _value(match: re.Match[str], negative: bool) -> Decimal:
    """The matched number; `NOT_WHOLE` after a division by zero, or out of range."""
    top = match["top"] or match["top_digit"] or match["value"]
    below = match["below"] or match["below_digit"] or match["under"]
    number = Decimal(top.replace(",", "") + (f"e{match['power']}" if match["power"] else ""))
    if below is not None:
        number = exact_context(number).divide(number, Decimal(below.replace(",", "")))
    if negative:
        number = number.copy_negate()
    return number if number.is_finite() else NOT_WHOLE
