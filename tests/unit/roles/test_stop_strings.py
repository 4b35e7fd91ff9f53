"""Stop strings, against a search in the whole text of every prefix of a response."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.roles.engines.interface import Completion, SampleRequest
from rlhf_ray.roles.engines.stop_strings import ResponseWatch, watch_for

PIECES = ["▁the", "▁end", "end", "▁", ".", "\n", "▁a", "ing", "é", "<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "ab", "abab"]
SPECIAL = len(PIECES)
"""A token that decodes to nothing."""


def metaspace_decode(tokens):
    """As SentencePiece's: the first space of a text is dropped, and bytes become characters when they are complete."""
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="."))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer.decode([token for token in tokens if token != SPECIAL])


def bytes_decode(tokens):
    """One token per byte, as in the rarest texts of byte-level tokenizers."""
    return bytes(tokens).decode(errors="replace")


def expected_end(tokens, strings, decode, least):
    """The shortest prefix, of at least so many tokens, in whose text a string is complete that was not before."""
    for count in range(1, len(tokens) + 1):
        new, old = decode(tokens[:count]), decode(tokens[: count - 1])
        if count >= least and any(new.count(string) > old.count(string) for string in strings):
            return count
    return None


def watch_of(strings, decode, least=0):
    """Watches a response from its first token on."""
    return ResponseWatch(SampleRequest([], SamplingConfig(stop=strings, min_tokens=least), 99, 0, [0]), decode)


@pytest.mark.parametrize("least", [0, 7])
@pytest.mark.parametrize(("decode", "draw"), [
    (bytes_decode, lambda rng: [b for _ in range(14) for b in rng.choice(["a", "b", "é", "€", "\n"]).encode()]),
    (metaspace_decode, lambda rng: [rng.randrange(SPECIAL + 1) for _ in range(30)]),
])
def test_a_response_ends_with_the_token_that_completes_a_string(decode, draw, least):
    rng, ended = random.Random(3), 0
    strings = ["ab\n", "€a", "é", " end.", "the", "\n\n"]
    for _ in range(300):
        tokens, chosen = draw(rng), rng.sample(strings, rng.choice([1, 2]))
        watch = watch_of(chosen, decode, least)
        end = next((count for count in range(1, len(tokens) + 1) if watch.ended(tokens[:count])), None)
        assert end == expected_end(tokens, chosen, decode, least), (decode(tokens), chosen)
        ended += end is not None
    assert ended > 50


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_how_tokens_arrive_does_not_matter(size):
    whole = completion("one two END three")
    watch = watch_of(["END", "never"], bytes_decode)
    for start in range(0, len(whole.tokens), size):
        watch.ended(whole.tokens[: start + size].tolist())
    assert bytes_decode(watch.cut(whole).tokens.tolist()) == "one two END"


def test_a_string_that_was_complete_too_early_does_not_end_the_response_later():
    cut = [watch_of(["END"], bytes_decode, least).cut(completion("END and END")) for least in (0, 3, 4, 11, 12)]
    assert [(len(one.tokens), one.finish_reason) for one in cut] == [
        (3, "stop"), (3, "stop"), (11, "stop"), (11, "stop"), (11, "length")]


def completion(text, reason="length"):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Completion(tokens, -tokens.astype(np.float32), np.arange(len(tokens), dtype=np.int32), reason)


def request(**options):
    return SampleRequest(list(b"prompt E"), SamplingConfig(stop=["END"], **options), 20, 0, [0], sampled=2)


def test_a_watch_cuts_what_was_sampled_too_far_and_calls_it_finished():
    watch = ResponseWatch(request(), bytes_decode)
    assert not watch.ended(list(b"")) and not watch.ended(list(b"N")) and watch.ended(list(b"ND!"))
    cut = watch.cut(completion("ND!", "abort"))
    assert (bytes_decode(cut.tokens.tolist()), cut.finish_reason) == ("ND", "stop")
    assert cut.logprobs.tolist() == [-ord("N"), -ord("D")] and cut.versions.tolist() == [0, 1]


def test_a_watch_begins_with_the_tokens_of_earlier_requests_but_not_with_the_prompt():
    assert ResponseWatch(request(), bytes_decode).ended(list(b"ND"))
    whole = SampleRequest(list(b"prompt E"), SamplingConfig(stop=["END"]), 20, 0, [0])
    assert not ResponseWatch(whole, bytes_decode).ended(list(b"ND"))


def test_a_response_without_a_stop_string_is_as_it_was():
    sampled = completion("other", "abort")
    assert ResponseWatch(request(), bytes_decode).cut(sampled) is sampled
    assert watch_for(SampleRequest([1], SamplingConfig(), 20, 0, [0]), bytes_decode) is None


def test_a_continued_request_has_fewer_tokens_to_go_before_it_may_end():
    assert [SampleRequest([1] * 9, SamplingConfig(min_tokens=5), room, 0, [0], sampled).min_tokens
            for room, sampled in ((20, 0), (20, 3), (20, 7), (4, 0))] == [5, 2, 0, 4]
