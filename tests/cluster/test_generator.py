"""The generator on the real vLLM, compared with Hugging Face's forward pass of the same weights (float32)."""

import asyncio
import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from rlhf_ray.cluster.processes import descendants
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.errors import DamagedBucket, DataError, WeightsError, WorkerError
from rlhf_ray.models.generator_parity import given_rows
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.engines.partial_rollouts import PartialRolloutEngine
from rlhf_ray.weights.manifest import expand_fused_groups
from tests.cluster.generators import (
    CONTEXT,
    EOS,
    KEYS,
    LONG,
    MANY,
    PROMPTS,
    Q_PROJ,
    ROWS,
    TURN_END,
    VOCAB,
    alone,
    assert_same,
    buckets_of,
    gap,
    load_model,
    make_generator,
    publish,
    reference_logprobs,
    sealed_buckets_of,
)
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tied and an untied model."""
    root = tmp_path_factory.mktemp("models")
    made = {kind: make_tiny_llama(root / kind, VOCAB, tied=kind == "tied") for kind in ("tied", "untied")}
    for directory in made.values():
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [TURN_END]}))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": TURN_END}))
    return made


@pytest.fixture(scope="module")
def new_models(tmp_path_factory):
    """Models of the same shapes with other weights, as learners would publish them."""
    root = tmp_path_factory.mktemp("new")
    return {k: load_model(make_tiny_llama(root / k, VOCAB, tied=k == "tied", seed=7)) for k in ("tied", "untied")}


def test_a_key_gives_the_same_tokens_alone_in_a_batch_and_on_a_fresh_engine(loop, directories):
    async def on_a_fresh_engine(draw):
        generator = make_generator(directories["tied"])
        await generator.start()
        try:
            return await draw(generator)
        finally:
            await generator.stop()

    async def both(generator):
        thirds = [generator.generate(PROMPTS, KEYS[i : i + 3], 3) for i in range(0, ROWS, 3)]
        batched = await asyncio.gather(*thirds)
        return type(batched[0]).concat(batched), await alone(generator, KEYS[::-1])

    async def only_alone(generator):
        return await alone(generator, KEYS)

    batched, reversed_alone = loop.run_until_complete(on_a_fresh_engine(both))
    fresh = loop.run_until_complete(on_a_fresh_engine(only_alone))
    assert_same(batched, reversed_alone.select(range(ROWS)[::-1]))
    assert_same(batched, fresh)


@pytest.fixture(scope="module", params=["tied", "untied"])
def started(request, loop, directories):
    """(kind, generator, Hugging Face model of its first weights)."""
    directory = directories[request.param]
    generator = make_generator(directory)
    loop.run_until_complete(generator.start())
    yield request.param, generator, load_model(directory)
    loop.run_until_complete(generator.stop())


def version_of(loop, generator):
    """Version of the weights that the generator samples with; None if it refuses to, after a failed publication."""
    try:
        rollout = loop.run_until_complete(generator.generate(PROMPTS, KEYS[:1], 1, SamplingConfig(max_tokens=1)))
    except WeightsError:
        return None
    return rollout.versions[rollout.response_mask].item()


@pytest.fixture
def running(started, loop):
    """The started generator, back at version 0 and the weights it started with."""
    kind, generator, model = started
    if version_of(loop, generator) != 0:
        loop.run_until_complete(publish(generator, model, 0, resend=True))
    return kind, generator, model


def test_logprobs_equal_hugging_face_before_and_after_a_publication(loop, running, new_models):
    kind, generator, old = running
    before = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    assert gap(old, before) < 1e-4
    loop.run_until_complete(publish(generator, new_models[kind], 1))
    after = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    assert gap(new_models[kind], after) < 1e-4
    assert gap(old, after) > 1.0, "the two models must differ for this test to say anything"
    assert set(before.versions[before.response_mask]) == {0} and set(after.versions[after.response_mask]) == {1}


def test_new_weights_are_packed_as_those_that_the_engine_began_with(loop, running, new_models):
    """Also in a thread with another number of compute threads, where oneDNN's layout of `qkv_proj` differs on AVX2."""
    kind, generator, _ = running
    try:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(2,)) as pool:
            loop.set_default_executor(pool)
            loop.run_until_complete(publish(generator, new_models[kind], 1))
    finally:
        loop.set_default_executor(ThreadPoolExecutor())
    rollout = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    assert gap(new_models[kind], rollout) < 1e-4


def test_given_tokens_have_transformers_log_probabilities_before_and_after_a_publication(loop, running, new_models):
    kind, generator, old = running
    rows = given_rows(old.config, CONTEXT - 1, (CONTEXT - 1, 20, 2))
    compared = rows.response_mask
    values, version = loop.run_until_complete(generator.given_logprobs(rows))
    assert version == 0 and np.abs(values - reference_logprobs(old, rows)[compared]).max() < 1e-4
    loop.run_until_complete(publish(generator, new_models[kind], 1))
    values, version = loop.run_until_complete(generator.given_logprobs(rows))
    assert version == 1 and np.abs(values - reference_logprobs(new_models[kind], rows)[compared]).max() < 1e-4
    assert len(values) == CONTEXT - 2 + 19 + 1


def test_given_tokens_go_before_samples_that_wait_and_change_none(loop, running):
    """Eight of 48 samples are sampled at a time."""
    _, generator, old = running
    rows = given_rows(old.config, 31)

    async def both():
        sampling = asyncio.create_task(generator.generate(PROMPTS, MANY, 3, LONG))
        await asyncio.sleep(0.05)
        await generator.given_logprobs(rows)
        made = generator.tokens_made()
        return made, await sampling

    before = generator.tokens_made()
    made, rollout = loop.run_until_complete(both())
    assert made - before < rollout.response_mask.sum() / 2
    assert_same(rollout, loop.run_until_complete(generator.generate(PROMPTS, MANY, 3, LONG)))


def test_logprobs_are_those_after_temperature(loop, running):
    _, generator, model = running
    cold = SamplingConfig(max_tokens=16, temperature=0.5)
    assert gap(model, loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1, cold)), temperature=0.5) < 1e-4


def test_temperature_zero_takes_the_likeliest_token(loop, running):
    _, generator, model = running
    greedy = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1, SamplingConfig(max_tokens=8, temperature=0)))
    for i in range(ROWS):
        tokens = torch.from_numpy(greedy.row(i, "tokens").astype(np.int64))
        best = model(tokens[None]).logits[0].argmax(-1)
        mask = greedy.row(i, "response_mask")[1:]
        assert torch.equal(tokens[1:][mask], best[:-1][mask])


def test_rows_of_a_rollout_are_prompt_then_response_with_every_column_aligned(loop, running):
    _, generator, _ = running
    rollout = loop.run_until_complete(generator.generate(PROMPTS, MANY, 1, LONG))
    assert rollout.keys == MANY and len(set(rollout.seeds.tolist())) == len(MANY)
    ends = set()
    for i, key in enumerate(MANY):
        prompt, mask = PROMPTS.row(key.row, "tokens"), rollout.row(i, "response_mask")
        response = rollout.row(i, "tokens")[len(prompt) :]
        assert np.array_equal(rollout.row(i, "tokens")[: len(prompt)], prompt)
        assert not mask[: len(prompt)].any() and mask[len(prompt) :].all()
        assert (rollout.row(i, "logprobs")[len(prompt) :] < 0).all()
        assert not {EOS, TURN_END} & set(response[:-1])
        if rollout.finish_reasons[i] == "stop":
            ends.add(int(response[-1]))
        else:
            assert rollout.finish_reasons[i] == "length" and len(response) == 80
    assert {"stop", "length"} == set(rollout.finish_reasons)
    assert ends == {EOS, TURN_END}, "the token that ends a response belongs to it"
    outside = ~rollout.response_mask
    assert (rollout.logprobs[outside] == 0).all() and (rollout.versions[outside] == -1).all()


def test_samples_of_one_prompt_differ_and_so_do_runs_and_epochs(loop, running):
    _, generator, _ = running
    keys = [SampleKey(0, 4, 0), SampleKey(0, 4, 1), SampleKey(1, 4, 0)]
    first = loop.run_until_complete(generator.generate(PROMPTS, keys, 1))
    second = loop.run_until_complete(generator.generate(PROMPTS, keys, 2))
    rows = {tuple(r.row(i, "tokens")) for r in (first, second) for i in range(3)}
    assert len(rows) == 6


def test_a_key_finds_its_prompt_by_row_number(loop, running):
    _, generator, _ = running
    keys = [SampleKey(0, row, 0) for row in (7, 2, 7)]
    few = PROMPTS.select([2, 7])
    rollout, other = (loop.run_until_complete(generator.generate(p, keys, 1)) for p in (few, PROMPTS))
    assert_same(rollout, other)
    assert rollout.row(0, "tokens")[: PROMPTS.lengths[7]].tolist() == PROMPTS.row(7, "tokens").tolist()


def test_a_prompt_without_room_for_a_response_is_named(loop, running):
    _, generator, _ = running
    long = Prompts(offsets_of([CONTEXT]), np.full(CONTEXT, 5, np.int32), [""], [{}], np.arange(1))
    with pytest.raises(DataError, match=f"row 0 has {CONTEXT} tokens; responses need 1 to {CONTEXT - 1}"):
        loop.run_until_complete(generator.generate(long, [SampleKey(0, 0, 0)], 1))
    nearly = Prompts(offsets_of([CONTEXT - 2]), np.full(CONTEXT - 2, 5, np.int32), [""], [{}], np.arange(1))
    rollout = loop.run_until_complete(generator.generate(nearly, [SampleKey(0, 0, 0)], 1))
    assert rollout.response_mask.sum() <= 2


async def publish_in_flight(generator, model):
    """Start long responses, publish version 1 when a third of the tokens are there, and wait for the responses."""
    made = generator.tokens_made()
    drawing = asyncio.create_task(generator.generate(PROMPTS, KEYS[:8], 1, LONG))
    async with asyncio.timeout(30):
        while generator.tokens_made() - made < 150:
            await asyncio.sleep(0.001)
    await publish(generator, model, 1)
    return await drawing


def assert_each_token_matches_its_weights(rollout, old, new):
    """Tokens of version 0 have the old weights' log-probabilities, those of version 1 the new ones'. A row has both."""
    assert gap(old, rollout, rollout.versions == 0) < 1e-4
    assert gap(new, rollout, rollout.versions == 1) < 1e-4
    assert any({0, 1} <= set(rollout.row(i, "versions")) for i in range(len(rollout)))
    for i in range(len(rollout)):
        versions = rollout.row(i, "versions")
        assert (np.diff(versions[versions >= 0]) >= 0).all()


def test_weights_published_in_flight_take_effect_from_one_token_to_the_next(loop, running, new_models):
    kind, generator, old = running
    rollout = loop.run_until_complete(publish_in_flight(generator, new_models[kind]))
    assert_each_token_matches_its_weights(rollout, old, new_models[kind])


@pytest.mark.parametrize("engine", ["in_process", pytest.param("async", marks=pytest.mark.slow)])
def test_where_a_pass_has_no_room_for_all_sequences_they_begin_one_after_the_other(
        loop, directories, new_models, engine):
    """New prompts, and sequences of prompt and response that begin again with new weights."""
    old, new, rows = load_model(directories["tied"]), new_models["tied"], range(8)
    tokens = np.random.default_rng(6).integers(2, VOCAB, 8 * 60).astype(np.int32)
    prompts = Prompts(offsets_of([60] * 8), tokens, [""] * 8, [{} for _ in rows], np.arange(8))
    keys = [SampleKey(0, row, 0) for row in rows]

    async def check():
        generator = make_generator(directories["tied"], engine, max_num_batched_tokens=CONTEXT)
        await generator.start()
        try:
            together = await generator.generate(prompts, keys, 1)
            each = [await generator.generate(prompts, [key], 1) for key in keys]
            in_flight = await publish_in_flight(generator, new)
        finally:
            await generator.stop()
        return together, type(together).concat(each), in_flight

    together, each, in_flight = loop.run_until_complete(check())
    assert_same(together, each)
    assert len(in_flight.tokens) > 3 * CONTEXT
    assert_each_token_matches_its_weights(in_flight, old, new)


def aborted_and_continued(loop, generator, model):
    """A rollout as `publish_in_flight` makes it, of a generator that aborts what new weights meet."""
    kept = generator._engine
    generator._engine = PartialRolloutEngine(kept)
    try:
        return loop.run_until_complete(publish_in_flight(generator, model))
    finally:
        generator._engine = kept


def test_responses_that_new_weights_abort_are_continued_with_what_they_had(loop, running, new_models):
    kind, generator, old = running
    rollout = aborted_and_continued(loop, generator, new_models[kind])
    assert_each_token_matches_its_weights(rollout, old, new_models[kind])
    assert set(rollout.finish_reasons) <= {"stop", "length"}
    assert max(rollout.row(i, "response_mask").sum() for i in range(len(rollout))) <= LONG.max_tokens


def test_a_damaged_bucket_leaves_the_old_weights_and_sent_again_completes_the_publication(loop, running, new_models):
    kind, generator, old = running
    buckets = buckets_of(new_models[kind], 1)
    damaged = [array.copy() for array in buckets[1].arrays]
    damaged[-1][100] ^= 1

    async def load_damaged():
        await generator.begin_weights(1, 1, len(buckets))
        await generator.load_weights(buckets[0], 1)
        await generator.load_weights(replace(buckets[1], arrays=damaged), 1)

    async def load_again():
        for bucket in buckets[1:]:
            await generator.load_weights(bucket, 1)
        await generator.finish_weights(1)

    with pytest.raises(DamagedBucket, match=r"bucket 1 of \d+, weights version 1: tensor .* has digest"):
        loop.run_until_complete(load_damaged())
    assert version_of(loop, generator) == 0
    assert gap(old, loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))) < 1e-4
    loop.run_until_complete(load_again())
    assert gap(new_models[kind], loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))) < 1e-4
    assert version_of(loop, generator) == 1


def test_a_refused_publication_stops_generation_until_a_whole_one_arrives(loop, running, new_models):
    kind, generator, _ = running
    buckets = buckets_of(new_models[kind], 1)

    async def load_twice():
        await generator.begin_weights(1, 1, len(buckets))
        await generator.load_weights(buckets[0], 1)
        await generator.load_weights(buckets[0], 1)

    with pytest.raises(WeightsError, match="bucket 0"):
        loop.run_until_complete(load_twice())
    with pytest.raises(WeightsError, match="stays at weights version 0 and does not generate"):
        loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    with pytest.raises(WeightsError, match="no publication was in progress"):
        loop.run_until_complete(generator.finish_weights(1))
    loop.run_until_complete(publish(generator, new_models[kind], 1))
    rollout = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    assert gap(new_models[kind], rollout) < 1e-4 and set(rollout.versions[rollout.response_mask]) == {1}


def test_a_publication_under_way_leaves_generation_on_the_old_weights(loop, running, new_models):
    kind, generator, old = running
    buckets = buckets_of(new_models[kind], 1)

    async def generate_between_buckets():
        await generator.begin_weights(1, 1, len(buckets))
        for bucket in buckets[:-1]:
            await generator.load_weights(bucket, 1)
        return await generator.generate(PROMPTS, KEYS, 1)

    rollout = loop.run_until_complete(generate_between_buckets())
    assert gap(old, rollout) < 1e-4 and set(rollout.versions[rollout.response_mask]) == {0}
    with pytest.raises(WeightsError, match="ended without bucket"):
        loop.run_until_complete(generator.finish_weights(1))


def test_matrices_that_get_packed_arrive_with_room_after_each_row_and_others_without(running):
    from vllm.model_executor.layers.linear import LinearBase

    from rlhf_ray.weights.double_buffer import CACHE_LINE, copy_layer

    _, generator, _ = running
    layers = list(generator._engine._model.modules())
    doubles = {layer: copy_layer(layer).copy.weight for layer in layers if getattr(layer, "weight", None) is not None}
    packed = [weight for layer, weight in doubles.items() if isinstance(layer, LinearBase)]
    assert len(packed) == 4 * len(generator._engine._model.model.layers)
    assert {(4 * (w.stride(0) - w.shape[1]), w.stride(1)) for w in packed} == {(CACHE_LINE, 1)}
    assert all(w.is_contiguous() for layer, w in doubles.items() if not isinstance(layer, LinearBase))


async def publish_changing(generator, sealed, version):
    """A publication without what does not change."""
    count = sealed.plan.changing.buckets
    await generator.begin_weights(version, version, count, False, sealed.unchanged())
    for index in range(count):
        await generator.load_weights(sealed.bucket(version, index, whole=False), version)
    await generator.finish_weights(version)


def changed_after_a_whole_publication(loop, generator, model, changing):
    """Sealed buckets of a copy of `model`, published whole as version 1; then the tensors named `changing` changed."""
    model = copy.deepcopy(model)
    sealed = sealed_buckets_of(model, changing)

    async def publish_whole():
        await generator.begin_weights(1, 1, sealed.plan.whole.buckets)
        for index in range(sealed.plan.whole.buckets):
            await generator.load_weights(sealed.bucket(1, index), 1)
        await generator.finish_weights(1)

    loop.run_until_complete(publish_whole())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in changing:
                parameter.mul_(-1.5)
    return sealed, model


def test_what_did_not_change_is_left_out_and_the_rest_takes_effect(loop, running, new_models):
    kind, generator, _ = running
    changing = expand_fused_groups({Q_PROJ, "model.norm.weight", "model.embed_tokens.weight"},
                                   generator.fused_groups())
    sealed, changed = changed_after_a_whole_publication(loop, generator, new_models[kind], changing)
    assert sealed.plan.changing.nbytes < sealed.plan.whole.nbytes
    loop.run_until_complete(publish_changing(generator, sealed, 2))
    rollout = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    assert gap(changed, rollout) < 1e-4 and set(rollout.versions[rollout.response_mask]) == {2}
    assert gap(new_models[kind], rollout) > 1.0, "the change must show for this test to say anything"


def test_a_part_of_a_fused_layer_is_refused_and_the_old_weights_stay_whole(loop, running, new_models):
    kind, generator, _ = running
    sealed, _ = changed_after_a_whole_publication(loop, generator, new_models[kind], {Q_PROJ})
    with pytest.raises(WeightsError, match=r"'model.layers.0.self_attn.qkv_proj' received new .* without .*k_proj"):
        loop.run_until_complete(publish_changing(generator, sealed, 2))
    with pytest.raises(WeightsError, match="stays at weights version 1 and does not generate"):
        loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    loop.run_until_complete(publish(generator, new_models[kind], 2))
    rollout = loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))
    assert gap(new_models[kind], rollout) < 1e-4


def test_a_cancelled_call_stops_its_requests(loop, running):
    _, generator, _ = running

    async def cancel_early():
        made = generator.tokens_made()
        drawing = asyncio.create_task(generator.generate(PROMPTS, KEYS, 1, LONG))
        while generator.tokens_made() == made:
            await asyncio.sleep(0.001)
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing
        await generator.generate(PROMPTS, KEYS[:1], 1, SamplingConfig(max_tokens=1))
        return made

    loop.run_until_complete(cancel_early())
    still = generator.tokens_made()
    time.sleep(0.2)
    assert generator.tokens_made() == still


def test_a_stopped_generator_says_so(loop, directories):
    generator = make_generator(directories["tied"])
    with pytest.raises(WorkerError, match="generator/0 is not running; call start first"):
        loop.run_until_complete(generator.generate(PROMPTS, KEYS, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "in_flight"), [("tied", "keep"), ("untied", "abort")])
def test_the_asynchronous_engine_passes_the_same_checks_and_leaves_no_process(
        loop, directories, new_models, kind, in_flight):
    old, new = load_model(directories[kind]), new_models[kind]
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # a Ray cluster that tests share

    async def check():
        generator = make_generator(directories[kind], engine="async", in_flight=in_flight)
        await generator.start()
        children = {child.pid for child in descendants(psutil.Process())} - others
        try:
            assert children, "vLLM runs in processes of its own"
            before = await generator.generate(PROMPTS, KEYS, 1)
            assert gap(old, before) < 1e-4
            assert_same(before, await generator.generate(PROMPTS, KEYS, 1))
            assert_each_token_matches_its_weights(await publish_in_flight(generator, new), old, new)
            after = await generator.generate(PROMPTS, KEYS, 1)
            assert gap(new, after) < 1e-4 and set(after.versions[after.response_mask]) == {1}
        finally:
            await generator.stop()
        return children

    children = loop.run_until_complete(check())
    _, alive = psutil.wait_procs([psutil.Process(p) for p in children if psutil.pid_exists(p)], timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
