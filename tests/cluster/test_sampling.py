"""Every way to sample, on the real vLLM: the distribution against Hugging Face's logits, and where responses end."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.records import offsets_of
from rlhf_ray.roles.engines.partial_rollouts import PartialRolloutEngine
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from tests.cluster.generators import EOS, KEYS, MANY, PROMPTS, VOCAB, load_model, make_generator
from tests.models import make_tiny_llama

STEM = {"max_tokens": 40}
TRUNCATED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "min_tokens": 4, "stop_token_ids": [7, 300]}
"""All that training allows, at once."""
LONG_ENOUGH = {"min_tokens": 12, "stop_token_ids": list(range(2, 120))}
TWO_WORDS = 6
"""A stop string of two words begins with this token of a response."""


@pytest.fixture(scope="module")
def loop():
    """The event loop that the generator lives in."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "m", VOCAB)


@pytest.fixture(scope="module")
def generator(loop, directory):
    it = make_generator(directory, sampling=SamplingConfig(**STEM, **TRUNCATED))
    loop.run_until_complete(it.start())
    yield it
    loop.run_until_complete(it.stop())


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory)


def generated(loop, generator, keys=KEYS, **sampling):
    return loop.run_until_complete(generator.generate(PROMPTS, keys, 1, SamplingConfig(**{**STEM, **sampling})))


def response(rollout, i):
    return rollout.row(i, "tokens")[rollout.row(i, "response_mask")].tolist()


def text_of(tokens):
    """As the tokenizer of these models decodes: words of the form w12, without special tokens."""
    return " ".join(f"w{token}" for token in tokens if token > 1)


@torch.no_grad()
def sampling_logprobs(model, rollout, i, sampling, end_tokens):
    """[L, V] log-probabilities that the response tokens of row i are sampled from, computed step by step."""
    tokens, mask = torch.from_numpy(rollout.row(i, "tokens").astype(np.int64)), rollout.row(i, "response_mask")
    start, rows = int(mask.argmax()), []
    for place in range(start, len(tokens)):
        logits = model(tokens[None, :place]).logits[0, -1]
        seen = tokens[:place].unique()
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if place - start < sampling.min_tokens:
            logits[end_tokens] = -torch.inf
        logits = logits / sampling.temperature
        logits[logits.softmax(-1) < sampling.min_p * logits.softmax(-1).max()] = -torch.inf
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
        ranked = logits.softmax(-1).sort(descending=True)
        logits[ranked.indices[(ranked.values.cumsum(-1) - ranked.values) >= sampling.top_p]] = -torch.inf
        rows.append(logits.log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("options", [
    {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"repetition_penalty": 1.4}, {"min_tokens": 12},
    {**TRUNCATED, "repetition_penalty": 0.9},
], ids=str)
def test_tokens_come_from_the_distribution_that_is_asked_for(loop, generator, model, options):
    rollout, sampling = generated(loop, generator, MANY[:16], **options), SamplingConfig(**STEM, **options)
    for i in range(len(rollout)):
        expected = sampling_logprobs(model, rollout, i, sampling, [EOS, *sampling.stop_token_ids])
        own = expected.gather(1, torch.tensor(response(rollout, i))[:, None])[:, 0].numpy()
        assert np.allclose(rollout.row(i, "logprobs")[rollout.row(i, "response_mask")], own, atol=1e-4)


def assert_learners_follow(directory, loop, generator, options):
    """A packed model, as learners and the reference have, gives the log-probabilities of what was sampled from."""
    rollout = generated(loop, generator, MANY, **options)
    scorer = ReferenceScorer(ModelConfig(path=str(directory)), 4096, options.get("temperature", 1.0))
    scorer.start()
    assert np.allclose(scorer.logprobs([rollout]).values, rollout.logprobs, atol=1e-4)
    unmasked = scorer.logprobs([replace(rollout, mask_sizes=None, mask_tokens=None)])
    assert not np.allclose(unmasked.values, rollout.logprobs, atol=1e-2), "the masks must matter"
    return rollout


def test_learners_follow_truncated_sampling(loop, generator, directory, model):
    rollout = assert_learners_follow(directory, loop, generator, TRUNCATED)
    sampling = SamplingConfig(**STEM, **TRUNCATED)
    starts = offsets_of(np.abs(rollout.mask_sizes))
    for i in range(6):
        distributions = sampling_logprobs(model, rollout, i, sampling, [EOS, 7, 300])
        places = np.flatnonzero(rollout.row(i, "response_mask")) + rollout.offsets[i]
        for place, distribution in zip(places, distributions, strict=True):
            mask = rollout.mask_tokens[starts[place] : starts[place + 1]]
            assert set(mask) == set(torch.isfinite(distribution).nonzero()[:, 0].tolist())
    assert (rollout.mask_sizes[~rollout.response_mask] == 0).all()


def test_learners_follow_a_continued_response(loop, generator, directory):
    """It is cut one token before it may end."""
    kept = generator._engine
    generator._engine = PartialRolloutEngine(CutBefore(kept, TRUNCATED["min_tokens"] - 1))
    try:
        rollout = assert_learners_follow(directory, loop, generator, TRUNCATED)
    finally:
        generator._engine = kept
    assert min(len(response(rollout, i)) for i in range(len(rollout))) >= TRUNCATED["min_tokens"]
    assert rollout.response_mask.sum() > 200 and (rollout.mask_sizes[rollout.response_mask] > 0).all()


def test_another_distribution_than_training_s_has_no_masks(loop, generator):
    for other in ({}, {**TRUNCATED, "top_k": 5}, {**TRUNCATED, "stop_token_ids": [7]}):
        assert generated(loop, generator, **other).mask_sizes is None
    assert generated(loop, generator, **{**TRUNCATED, "max_tokens": 5, "stop": ["x"]}).mask_sizes is not None


def test_stop_tokens_end_responses_and_none_before_min_tokens(loop, generator):
    common = np.bincount(np.concatenate([response(generated(loop, generator), i) for i in range(len(KEYS))])).argmax()
    rollout = generated(loop, generator, MANY, stop_token_ids=[int(common)], min_tokens=3)
    ends = set()
    for i in range(len(MANY)):
        tokens = response(rollout, i)
        assert not {EOS, common} & set(tokens[:-1]) and len(tokens) >= 3
        assert rollout.finish_reasons[i] == ("stop" if tokens[-1] in (EOS, common) else "length")
        ends |= {tokens[-1]} & {EOS, common}
    assert common in ends


def assert_ends_at_two_words(whole, rollout, i, words):
    """Row i is that of `whole` up to the token that completes `words`, and finished."""
    tokens = response(whole, i)
    count = next(n for n in range(1, len(tokens) + 1) if words in text_of(tokens[:n]))
    assert response(rollout, i) == tokens[:count] and rollout.finish_reasons[i] == "stop"
    assert text_of(tokens[:count]).endswith(words) and count < len(tokens)
    mask, full = rollout.row(i, "response_mask"), whole.row(i, "response_mask")
    assert np.allclose(rollout.row(i, "logprobs")[mask], whole.row(i, "logprobs")[full][:count], atol=1e-5)
    assert rollout.row(i, "versions")[mask].tolist() == [0] * count


def longest(rollout):
    return max(range(len(rollout)), key=lambda i: len(response(rollout, i)))


def words_in(rollout, i):
    """The end of a word and the word after it: no token's text contains it, nor begins with it."""
    first, second = response(rollout, i)[TWO_WORDS : TWO_WORDS + 2]
    return f"{str(first)[-1]} w{second}"


def test_a_stop_string_over_two_tokens_ends_its_response_and_no_other(loop, generator):
    whole = generated(loop, generator)
    i = longest(whole)
    rollout = generated(loop, generator, stop=[words_in(whole, i), "never"])
    assert_ends_at_two_words(whole, rollout, i, words_in(whole, i))
    others = [j for j in range(len(KEYS)) if words_in(whole, i) not in text_of(response(whole, j))]
    assert len(others) > 6
    assert all(response(rollout, j) == response(whole, j) for j in others)
    assert [rollout.finish_reasons[j] for j in others] == [whole.finish_reasons[j] for j in others]


class CutBefore:
    """An engine whose first call returns so many tokens of each response, as if new weights had aborted it there."""

    def __init__(self, engine, count):
        self._engine, self._count = engine, count

    async def sample(self, requests):
        completions = await self._engine.sample(
            [replace(r, max_tokens=r.max_tokens if r.sampled else self._count) for r in requests])
        return [completion if request.sampled else replace(completion, finish_reason="abort")
                for request, completion in zip(requests, completions, strict=True)]


def test_a_stop_string_is_found_across_the_cut_of_a_continued_response(loop, generator):
    greedy = {"temperature": 0, "max_tokens": 12}  # a continuation has another seed
    whole, kept = generated(loop, generator, **greedy), generator._engine
    i = longest(whole)
    words = words_in(whole, i)
    count = next(n for n in range(1, 13) if words in text_of(response(whole, i)[:n]))
    generator._engine = PartialRolloutEngine(CutBefore(kept, count - 1))
    try:
        rollout = generated(loop, generator, [KEYS[i]], stop=[words], **greedy)
    finally:
        generator._engine = kept
    assert response(rollout, 0) == response(whole, i)[:count] and rollout.finish_reasons == ["stop"]


@pytest.fixture(scope="module")
def asynchronous(loop, directory):
    """A generator on the asynchronous engine, whose training has a minimum length and many end tokens."""
    it = make_generator(directory, engine="async", sampling=SamplingConfig(**STEM, **LONG_ENOUGH))
    loop.run_until_complete(it.start())
    yield it
    loop.run_until_complete(it.stop())


@pytest.mark.slow
def test_the_async_engine_ends_responses_at_the_same_tokens(loop, generator, asynchronous):
    whole = generated(loop, generator)
    i = longest(whole)
    rollout = generated(loop, asynchronous, stop=[words_in(whole, i)])
    assert_ends_at_two_words(whole, rollout, i, words_in(whole, i))


@pytest.mark.slow
def test_learners_follow_a_minimum_length(loop, directory, asynchronous):
    rollout = assert_learners_follow(directory, loop, asynchronous, LONG_ENOUGH)
    assert set(rollout.mask_sizes[rollout.response_mask]) == {0, -119}
