"""Values that nobody would write on purpose."""

from hypothesis import strategies as st

ODD_TEXTS = [
    "",
    " ",
    "null",
    "~",
    "true",
    "nan",
    ".inf",
    "-1",
    "1e999",
    "0x10",
    "[",
    "{",
    "'",
    '"',
    "a: b",
    "<<",
    "&a",
    "\x00",
    "\u202e",
    "\ufeff",
    "\ud800",
    "💥",
    "..",
    "../../etc/passwd",
    "a" * 5000,
    "1" * 5000,
    "\r\n",
    "%s{0}",
]
TEXTS = st.one_of(
    st.sampled_from(ODD_TEXTS), st.text(max_size=20), st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=5)
)
NUMBERS = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([2**31, 2**63, -(2**64), 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
