"""Regular expressions and JSON schemas in their real process."""

import asyncio
import json

import pytest

from rlhf_ray.config.rewards import JSONSchemaReward, RegexReward
from rlhf_ray.errors import ConfigError, RewardError
from rlhf_ray.rewards.regex_and_json_schema import json_schema_source, regex_source


def told(source, requests):
    """(scores, failures) of one life of a source."""

    async def live():
        try:
            await source.start()
            return await source.score(requests)
        finally:
            await source.stop()

    answer = asyncio.run(live())
    return answer.scores.tolist(), answer.failures


def by_pattern(ask, cases, **fields):
    source = regex_source("shape", RegexReward(type="regex", **fields))
    return told(source, [ask(text, i, metadata={"answer": answer}) for i, (text, answer) in enumerate(cases)])


def test_a_match_somewhere_or_of_the_whole(ask):
    cases = [("<b>hi</b>", None), ("so <b>hi</b>", None), ("<b>hi", None), ("<b>\n</b>\n", None)]
    assert by_pattern(ask, cases, pattern="<b>.*</b>") == ([1, 1, 0, 1], 0)
    assert by_pattern(ask, cases, pattern="<b>.*</b>", match="full") == ([1, 0, 0, 1], 0)


def test_a_group_must_be_the_answer(ask):
    cases = [("Answer: 12", 12), ("Answer: 13", "12"), ("12", 12), ("Answer:  12 ", "12 ")]
    assert by_pattern(ask, cases, pattern=r"Answer:(.*)$", group=1, right=3, wrong=-1) == ([3, -1, -1, 3], 1)
    assert by_pattern(ask, cases, pattern=r"Answer:(?P<it>.*)$", group="it") == ([1, 0, 0, 1], 1)
    optional = [("x", "y"), ("xy", "y")]
    assert by_pattern(ask, optional, pattern=r"x(y)?", group=1) == ([0, 1], 0)


@pytest.mark.parametrize("fields, said", [
    ({"pattern": "(a"}, r"pattern='\(a' is not a regular expression: missing \)"),
    ({"pattern": "a", "group": 1}, r"group=1 is not a group of pattern='a', which has 0"),
    ({"pattern": "(?P<x>a)", "group": "y"}, r"group='y' is not a group .* named \['x'\]"),
    ({"pattern": "a" * 10 + "{99999999999}"}, "is not a regular expression"),
])
def test_a_pattern_that_cannot_work_is_refused_at_once(fields, said):
    with pytest.raises(ConfigError, match=said):
        RegexReward(type="regex", **fields)


def test_a_pattern_that_takes_for_ever_stops_at_its_deadline_and_names_the_sample(ask):
    source = regex_source("shape", RegexReward(type="regex", pattern="(a+)+$", timeout_s=0.5))
    requests = [ask("aaa", 0), ask("a" * 40 + "b", 1), ask("a", 2)]
    with pytest.raises(RewardError, match=r"failed: TooSlow: no verdict within 0\.5 s.*\n.*\n  response: 'a+b'"):
        told(source, requests)


SCHEMA = {"type": "object", "required": ["name", "age"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}}}


def by_schema(ask, cases, **fields):
    source = json_schema_source("form", JSONSchemaReward(type="json_schema", **fields))
    return told(source, [ask(text, i, metadata={"answer": answer}) for i, (text, answer) in enumerate(cases)])


def test_responses_must_be_json_that_the_schema_accepts(ask):
    texts = ['{"name": "Ada", "age": 36}', ' {"age": 36, "name": "Ada"}\n', '{"name": "ada", "age": 36}',
             '{"name": "Ada", "age": -1}', '{"name": "Ada"}', '{"name": "Ada", "age": 1.5}',
             '{"name": "Ada", "age": 36', "Ada, 36", "",
             '{"name": "Ada", "age": NaN}', "[" * 100_000, "9" * 10_000, "null"]
    scores, failures = by_schema(ask, [(text, None) for text in texts], accepts=SCHEMA)
    assert scores == [1, 1] + [0] * 11
    assert failures == 6, "what is no JSON at all: torn, plain words, nothing, NaN, too deep, too long a number"


@pytest.mark.parametrize("text", ["1" + "0" * 400, "1e999", "-1e999"])
def test_a_number_too_large_to_divide_is_a_wrong_response_and_ends_nothing(ask, text):
    assert by_schema(ask, [(text, None), ("1.5", None)], accepts={"multipleOf": 0.5}) == ([0, 1], 0)


def test_a_value_and_an_answer_too_deep_to_compare_are_wrong(ask):
    deep = "[" * 900 + "]" * 900
    assert by_schema(ask, [(deep, deep), ("[]", "[]")], accepts={}, answer="answer")[0][1] == 1


def test_the_value_must_be_the_answer_too(ask):
    cases = [("[1, 2]", "[1, 2]"), ("[1, 2]", [1, 2]), ("[2, 1]", [1, 2]), ("true", 1), ('"x"', "x"),
             ("[1.0, 2]", [1, 2])]
    assert by_schema(ask, cases, accepts={}, answer="answer") == ([1, 1, 0, 0, 1, 1], 0)


def test_a_schema_out_of_a_file(ask, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps({"type": "integer"}))
    assert by_schema(ask, [("3", None), ("3.5", None)], accepts=str(tmp_path / "schema.json")) == ([1, 0], 0)


@pytest.mark.parametrize("accepts, said", [
    ({"type": "strnig"}, r"rewards\.form\.accepts is not a JSON schema: .*strnig.* at \$\.type"),
    ({"required": "name"}, "is not a JSON schema"), ("/nowhere/schema.json", "cannot be read as a JSON schema"),
])
def test_a_schema_that_is_none(accepts, said):
    with pytest.raises(ConfigError, match=said):
        json_schema_source("form", JSONSchemaReward(type="json_schema", accepts=accepts))


def test_a_schema_fetches_nothing_and_follows_itself_safely(ask):
    with pytest.raises(ConfigError, match=r"nothing is downloaded"):
        by_schema(ask, [("1", None)], accepts={"$ref": "http://127.0.0.1:9/schema.json"})
    nested = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    assert by_schema(ask, [("[[[]]]", None), ("[" * 900 + "]" * 900, None)], accepts=nested)[0][0] == 1


OFTEN = {"properties": {"a": {"$ref": "#"}}}


@pytest.mark.parametrize("accepts, value", [
    ({"pattern": "(a+)+$"}, "a" * 40 + "b"),
    ({"anyOf": [{**OFTEN, "required": [key]} for key in "bc"]}, json.loads('{"a":' * 40 + "1" + "}" * 40)),
], ids=["a pattern", "two references to itself"])
def test_a_schema_that_takes_for_ever_stops_at_its_deadline(ask, accepts, value):
    source = json_schema_source("form", JSONSchemaReward(type="json_schema", accepts=accepts, timeout_s=0.5))
    with pytest.raises(RewardError, match="TooSlow: no verdict within 0.5 s"):
        told(source, [ask(json.dumps(value))])


def test_a_group_may_come_as_text_from_the_command_line():
    assert RegexReward(type="regex", pattern="(a)", group="1").group == 1
    assert RegexReward(type="regex", pattern="(?P<one>a)", group="one").group == "one"


@pytest.mark.parametrize("reference", ["#/$defs/missing", "https://example.com/schema.json", "#anchor"])
def test_a_reference_to_nothing_is_refused_at_once(reference):
    """Not at the first response that is JSON."""
    inner = {"type": "object", "properties": {"a": {"items": {"$ref": reference}}}}
    with pytest.raises(ConfigError, match=r"accepts has \$ref: .*nowhere in the schema.*\$defs"):
        json_schema_source("form", JSONSchemaReward(type="json_schema", accepts=inner))
