"""Rows and samples of records: their selection, concatenation, counting and files."""

from dataclasses import fields

import numpy as np
import pytest

from rlhf_ray.checkpoint.state_files import load_experience, save_experience
from rlhf_ray.records import Experience, SampleKey, offsets_of
from rlhf_ray.replay.buffer import ReplayBuffer

# Three samples of two prompts. Sample 0 is rows 0 and 1, sample 1 is row 2, sample 2 is rows 3 and 4.
MASKS = [[0, 1, 1], [0, 0, 1, 1, 1], [0, 1], [0, 1], [0, 0, 1]]
SAMPLES = [0, 0, 1, 2, 2]
KEYS = [SampleKey(0, 4, 0), SampleKey(0, 4, 1), SampleKey(0, 9, 0)]
WEIGHTS = [0.4, 0.6, 1.0, 0.5, 0.5]
MASK = np.concatenate(MASKS).astype(bool)
SPLIT = {"samples": np.array(SAMPLES), "row_weights": np.array(WEIGHTS, np.float32)}


def column(seed):
    return np.where(MASK, np.random.default_rng(seed).normal(size=len(MASK)), 0).astype(np.float32)


def experience(keys=KEYS, **split):
    return Experience(
        offsets=offsets_of([len(m) for m in MASKS]), tokens=np.arange(2, 2 + len(MASK), dtype=np.int32),
        response_mask=MASK, behaviour_logprobs=column(0), old_logprobs=column(1), reference_logprobs=column(2),
        values=column(3), advantages=column(4), returns=column(5), keys=keys, **split)


def test_each_row_is_a_sample_unless_said():
    plain = experience([SampleKey(0, row, 0) for row in range(5)])
    assert plain.samples.tolist() == [0, 1, 2, 3, 4] and plain.samples.dtype == np.int64
    assert plain.row_weights.tobytes() == np.ones(5, np.float32).tobytes()
    assert (len(plain), plain.sample_count) == (5, 5)
    assert plain.sample_starts.tolist() == plain.offsets[:-1].tolist()


def test_the_rows_of_a_sample_weigh_the_same_unless_said():
    assert experience(samples=np.array(SAMPLES)).row_weights.tolist() == [0.5, 0.5, 1, 0.5, 0.5]


def test_samples_are_counted_apart_from_rows():
    two = experience(**SPLIT)
    assert (len(two), two.sample_count) == (5, 3)
    assert [list(rows) for rows in two.sample_rows] == [[0, 1], [2], [3, 4]]
    assert two.sample_starts.tolist() == [0, 8, 10]


def test_the_buffer_counts_the_samples_of_experience_by_their_keys():
    buffer, record = ReplayBuffer(6, None, 0), experience(**SPLIT)
    places = [buffer.reserve(record.sample_count, 0) for _ in range(3)]
    assert places[2] is None, "six samples fill the buffer, whatever their rows"
    other = [SampleKey(1, key.row, key.sample) for key in KEYS]
    for place, keys in zip(places[:2], (KEYS, other), strict=True):
        place.keys = experience(keys, **SPLIT).keys
        place.fill("ref", 0, record.nbytes)
        buffer.commit(place)
    assert buffer.stats().samples_ready == 6 and buffer.lease(6, 0).samples == 6


def test_selected_rows_keep_their_samples_numbered_by_appearance():
    chosen = experience(**SPLIT).select([4, 1, 3, 0])
    assert chosen.samples.tolist() == [0, 1, 0, 1] and chosen.keys == [KEYS[2], KEYS[0]]
    assert chosen.row_weights.tolist() == pytest.approx([0.5, 0.6, 0.5, 0.4])
    assert chosen.lengths.tolist() == [3, 5, 2, 3]
    with pytest.raises(ValueError, match="not in the order of their samples"):
        list(chosen.sample_rows)


def test_concatenated_records_keep_their_samples():
    whole = Experience.concat([experience(**SPLIT), experience(**SPLIT).select([2, 3, 4])])
    assert whole.samples.tolist() == [0, 0, 1, 2, 2, 3, 4, 4] and whole.keys == [*KEYS, *KEYS[1:]]
    assert whole.row_weights.tolist() == pytest.approx([*WEIGHTS, *WEIGHTS[2:]])


def test_saved_records_keep_their_samples(tmp_path):
    path, saved = tmp_path / "e.npz", experience(**SPLIT)
    save_experience(path, saved)
    loaded = load_experience(path)
    for f in fields(Experience):
        ours, theirs = getattr(saved, f.name), getattr(loaded, f.name)
        assert np.array_equal(ours, theirs) if ours is not None else theirs is None, f.name
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), f.name


# Each token's mask lists its position in the record: once for those that are kept, twice for one that is excluded.
SIZES = np.where(MASK, 1, 0).astype(np.int32)
SIZES[4] = -2
MASKED = {"mask_sizes": SIZES, "mask_tokens": np.repeat(np.arange(len(MASK)), np.abs(SIZES)).astype(np.int32)}


def masks_of(record):
    return [part.tolist() for part in np.split(record.mask_tokens, np.cumsum(np.abs(record.mask_sizes))[:-1])]


def test_selected_concatenated_and_saved_records_keep_each_token_s_mask(tmp_path):
    whole = experience(**SPLIT, **MASKED)
    chosen = whole.select([4, 1])
    places = [*range(12, 15), *range(3, 8)]
    assert masks_of(chosen) == [[place] * abs(SIZES[place]) for place in places]
    assert chosen.mask_sizes.tolist() == SIZES[places].tolist()
    assert masks_of(Experience.concat([chosen, whole])) == [*masks_of(chosen), *masks_of(whole)]
    save_experience(tmp_path / "e.npz", whole)
    assert masks_of(load_experience(tmp_path / "e.npz")) == masks_of(whole)
    with pytest.raises(ValueError, match="mask_sizes is present in some parts"):
        Experience.concat([whole, experience(**SPLIT)])
