"""A publication reaches the model whole or not at all."""

from dataclasses import replace

import pytest

from rlhf_ray.errors import DamagedBucket, WeightsError
from rlhf_ray.weights.manifest import seal
from tests.unit.weights.receivers import TENSORS, Names, buckets_of, make_receiver, sealed_buckets_of


def publish(receiver, version, **options):
    """A whole publication, confirmed."""
    buckets = buckets_of(version)
    receiver.begin(version, len(buckets), **options)
    for bucket in buckets:
        receiver.load(bucket)
    receiver.finish(version)
    return receiver.confirm()


def assert_not_ready(receiver, version):
    """Still at `version`, and refusing to generate."""
    assert receiver.version == version
    with pytest.raises(WeightsError, match=f"generator/7 stays at weights version {version} and does not generate"):
        receiver.require_ready()


def test_a_whole_publication_is_accepted_whatever_order_it_came_in():
    receiver = make_receiver()
    receiver.begin(5, 3)
    for bucket in reversed(buckets_of(5)):
        receiver.load(bucket)
        receiver.require_ready()
        assert receiver.version == 4
    assert receiver.finish(5).names == ["c", "b", "a"]
    assert receiver.version == 4, "not confirmed before it is applied"
    assert receiver.confirm() == 5 == receiver.version
    receiver.require_ready()


@pytest.mark.parametrize("version", [3, 4])
def test_an_older_or_equal_version_is_refused_unless_it_is_sent_again_on_purpose(version):
    receiver = make_receiver()
    with pytest.raises(WeightsError, match=f"has weights version 4 and refuses version {version}"):
        receiver.begin(version, 3)
    receiver.require_ready()  # a refused announcement breaks nothing
    assert publish(receiver, version, resend=True) == version


def test_a_damaged_bucket_is_expected_again_and_interrupts_nothing():
    receiver = make_receiver()
    first, second, third = buckets_of(5)
    receiver.begin(5, 3)
    receiver.load(first)
    damaged = second.arrays[0].copy()
    damaged[0] ^= 255
    for bucket in (replace(second, arrays=[damaged]), replace(second, checksum="0")):
        with pytest.raises(DamagedBucket, match="bucket 1 of 3, weights version 5"):
            receiver.load(bucket)
        receiver.require_ready()
    receiver.load(third)
    with pytest.raises(WeightsError, match=r"ended without bucket\(s\) \[1\] of 3"):
        receiver.finish(5)
    assert_not_ready(receiver, 4)
    receiver.begin(5, 3)
    for bucket in (first, second, third):
        receiver.load(bucket)
    assert receiver.finish(5).names == ["a", "b", "c"] and receiver.confirm() == 5


def test_a_stage_never_sees_a_damaged_tensor_nor_what_comes_after_it_and_then_all_of_the_bucket_again():
    stage = Names()
    receiver = make_receiver(stage=lambda: stage)
    whole = sealed_buckets_of(bucket_bytes=1 << 20).bucket(5, 0)
    first, second, third = (array.copy() for array in whole.arrays)
    second[0] ^= 255
    receiver.begin(5, 1)
    with pytest.raises(DamagedBucket, match="tensor 'b' has digest"):
        receiver.load(replace(whole, arrays=[first, second, third]))
    assert stage.names == ["a"]
    receiver.load(whole)
    assert receiver.finish(5).names == ["a", "a", "b", "c"]
    assert receiver.confirm() == 5


def test_a_bucket_sent_again_with_other_tensors_is_refused():
    receiver = make_receiver()
    whole = sealed_buckets_of(bucket_bytes=1 << 20).bucket(5, 0)
    damaged = whole.arrays[1].copy()
    damaged[0] ^= 255
    receiver.begin(5, 1)
    with pytest.raises(DamagedBucket):
        receiver.load(replace(whole, arrays=[whole.arrays[0], damaged, whole.arrays[2]]))
    other = sealed_buckets_of({**TENSORS, "a": TENSORS["a"] + 1}, bucket_bytes=1 << 20).bucket(5, 0)
    with pytest.raises(WeightsError, match="'a' is in buckets 0 and 0"):
        receiver.load(other)
    assert_not_ready(receiver, 4)


@pytest.mark.parametrize("wrong, said", [
    ({"version": 6}, "bucket 1 is of version 6"),
    ({"count": 2}, "in 2 buckets, expected version 5 in 3"),
    ({"index": 3}, "not one of 3"),
    ({"index": 0}, "arrived twice"),

])
def test_a_bucket_that_does_not_belong_is_refused(wrong, said):
    receiver = make_receiver()
    first, second, _ = buckets_of(5)
    receiver.begin(5, 3)
    receiver.load(first)
    with pytest.raises(WeightsError, match=said):
        receiver.load(replace(second, **wrong))
    assert_not_ready(receiver, 4)


def test_finish_names_missing_buckets():
    receiver = make_receiver()
    receiver.begin(5, 3)
    receiver.load(buckets_of(5)[1])
    with pytest.raises(WeightsError, match=r"without bucket\(s\) \[0, 2\] of 3"):
        receiver.finish(5)
    assert_not_ready(receiver, 4)


def test_finish_of_another_version_is_refused():
    receiver = make_receiver()
    receiver.begin(5, 3)
    with pytest.raises(WeightsError, match="finish of version 6 while version 5 was being received"):
        receiver.finish(6)
    assert_not_ready(receiver, 4)


def test_finish_names_tensors_that_no_bucket_brought():
    receiver = make_receiver()
    buckets = buckets_of(5, {name: TENSORS[name] for name in ("a", "c")})
    receiver.begin(5, 2)
    for bucket in buckets:
        receiver.load(bucket)
    with pytest.raises(WeightsError, match="brought 2 of 3 tensors; missing are b"):
        receiver.finish(5)
    assert_not_ready(receiver, 4)


@pytest.mark.parametrize("tensors, said", [
    ({"a": TENSORS["a"].T}, r"'a' has shape \(4, 3\), the model's is \(3, 4\)"),
    ({"z": TENSORS["a"]}, "'z' is not one of the model's 3"),
])
def test_tensors_the_model_does_not_have_are_refused(tensors, said):
    receiver = make_receiver()
    receiver.begin(5, 1)
    with pytest.raises(WeightsError, match=said):
        receiver.load(buckets_of(5, tensors)[0])
    assert_not_ready(receiver, 4)


def test_a_tensor_in_two_buckets_is_refused():
    receiver = make_receiver()
    first = buckets_of(5)[0]
    receiver.begin(5, 3)
    receiver.load(first)
    with pytest.raises(WeightsError, match="'a' is in buckets 0 and 1"):
        receiver.load(seal(5, 1, 3, first.entries, first.arrays))
    assert_not_ready(receiver, 4)


def test_beginning_anew_forgets_what_came_before():
    receiver = make_receiver()
    receiver.begin(5, 3)
    receiver.load(buckets_of(5)[0])
    assert publish(receiver, 6) == 6


def test_a_failure_while_applying_keeps_the_old_version_unready():
    receiver = make_receiver()
    receiver.begin(5, 3)
    for bucket in buckets_of(5):
        receiver.load(bucket)
    receiver.finish(5)
    with pytest.raises(WeightsError, match="the engine said no"):
        receiver.fail("the engine said no")
    assert_not_ready(receiver, 4)


def publish_changing(receiver, sealed, version):
    """A publication without what does not change, confirmed."""
    count = sealed.plan.changing.buckets
    receiver.begin(version, count, unchanged=sealed.unchanged())
    for index in range(count):
        receiver.load(sealed.bucket(version, index, whole=False))
    receiver.finish(version)
    return receiver.confirm()


def publish_whole(receiver, sealed, version):
    """A whole publication of `sealed`, confirmed."""
    receiver.begin(version, sealed.plan.whole.buckets)
    for index in range(sealed.plan.whole.buckets):
        receiver.load(sealed.bucket(version, index))
    receiver.finish(version)
    return receiver.confirm()


def test_after_a_whole_publication_others_may_leave_out_what_did_not_change():
    receiver, sealed = make_receiver(), sealed_buckets_of(changing={"b"})
    publish_whole(receiver, sealed, 5)
    assert [publish_changing(receiver, sealed, version) for version in (6, 7)] == [6, 7]
    receiver.require_ready()


def test_what_the_receiver_was_built_with_is_never_taken_for_granted():
    receiver, sealed = make_receiver(), sealed_buckets_of(changing={"b"})
    publish_whole(make_receiver(), sealed, 5)
    with pytest.raises(WeightsError, match="does not have 2 of 2 tensors that weights version 6 leaves out"):
        publish_changing(receiver, sealed, 6)
    receiver.require_ready()  # a refused announcement breaks nothing
    assert publish_whole(receiver, sealed, 6) == 6


def test_other_bytes_under_the_same_name_are_not_what_was_left_out():
    receiver = make_receiver()
    publish_whole(receiver, sealed_buckets_of({**TENSORS, "c": TENSORS["c"] + 1}, changing={"b"}), 5)
    ours = sealed_buckets_of(changing={"b"})
    publish_whole(make_receiver(), ours, 5)
    with pytest.raises(WeightsError, match="does not have 1 of 2 tensors .*, 'c' among them"):
        publish_changing(receiver, ours, 6)


def test_after_a_break_nothing_counts_as_held():
    receiver, sealed = make_receiver(), sealed_buckets_of(changing={"b"})
    publish_whole(receiver, sealed, 5)
    receiver.begin(6, 1, unchanged=sealed.unchanged())
    with pytest.raises(WeightsError, match="without bucket"):
        receiver.finish(6)
    with pytest.raises(WeightsError, match="does not have 2 of 2"):
        receiver.begin(7, 1, unchanged=sealed.unchanged())
    assert publish_whole(receiver, sealed, 7) == 7


def test_a_tensor_that_was_to_be_left_out_is_refused():
    receiver, sealed = make_receiver(), sealed_buckets_of(changing={"b"})
    publish_whole(receiver, sealed, 5)
    receiver.begin(6, 3, unchanged=sealed.unchanged())
    with pytest.raises(WeightsError, match="'a' arrived in bucket 0, but was announced as unchanged"):
        receiver.load(sealed.bucket(6, 0))
