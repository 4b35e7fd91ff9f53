"""A publication reaches the model whole or not at all."""

from dataclasses import replace

import pytest
import torch

from rlhf_ray.errors import WeightsError
from rlhf_ray.weights.manifest import checksum, plan_buckets
from rlhf_ray.weights.publisher import Publication
from rlhf_ray.weights.receiver import Receiver

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5), "c": torch.zeros(2, 2)}
SHAPES = {name: tuple(t.shape) for name, t in TENSORS.items()}


def buckets_of(version, tensors=TENSORS, bucket_bytes=64):
    """All buckets of a publication; 64 bytes give one tensor each."""
    plan = plan_buckets([(n, tuple(t.shape), "float32") for n, t in tensors.items()], bucket_bytes)
    publication = Publication(version, plan, lambda names: {n: tensors[n] for n in names})
    return [publication.bucket(i) for i in range(publication.count)]


def make_receiver(version=4):
    """A receiver whose staged form is the bucket's index."""
    return Receiver("generator/7", version, SHAPES, lambda bucket: bucket.index)


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
    assert receiver.version == version and not receiver.ready
    with pytest.raises(WeightsError, match=f"generator/7 stays at weights version {version} and does not generate"):
        receiver.require_ready()


def test_a_whole_publication_is_staged_in_order_whatever_order_it_came_in():
    receiver = make_receiver()
    receiver.begin(5, 3)
    for bucket in reversed(buckets_of(5)):
        receiver.load(bucket)
        assert receiver.version == 4 and receiver.ready
    assert receiver.finish(5) == [0, 1, 2]
    assert receiver.version == 4, "not confirmed before it is applied"
    assert receiver.confirm() == 5 == receiver.version
    receiver.require_ready()


@pytest.mark.parametrize("version", [3, 4])
def test_an_older_or_equal_version_is_refused_unless_it_is_sent_again_on_purpose(version):
    receiver = make_receiver()
    with pytest.raises(WeightsError, match=f"has weights version 4 and refuses version {version}"):
        receiver.begin(version, 3)
    assert receiver.ready, "a refused announcement breaks nothing"
    assert publish(receiver, version, resend=True) == version


def test_a_damaged_bucket_breaks_the_publication_until_a_whole_one_is_confirmed():
    receiver = make_receiver()
    first, second, _ = buckets_of(5)
    receiver.begin(5, 3)
    receiver.load(first)
    damaged = second.data.copy()
    damaged[0] ^= 255
    with pytest.raises(WeightsError, match="bucket 1 of 3, weights version 5: expected checksum"):
        receiver.load(replace(second, data=damaged))
    assert_not_ready(receiver, 4)
    with pytest.raises(WeightsError, match="no publication was under way"):
        receiver.load(second)
    assert publish(receiver, 5) == 5
    receiver.require_ready()


@pytest.mark.parametrize("wrong, said", [
    ({"version": 6}, "bucket 1 is of version 6"),
    ({"count": 2}, "in 2 buckets, expected version 5 in 3"),
    ({"index": 3}, "not one of 3"),
    ({"index": 0}, "came twice"),
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
    with pytest.raises(WeightsError, match="finish of version 6 while version 5 was coming"):
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
        receiver.load(replace(first, index=1, checksum=checksum(first.data, first.entries, 5)))
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


def test_a_publication_gathers_one_bucket_at_a_time_and_yields_nothing_on_ranks_that_do_not_send():
    plan = plan_buckets([(n, shape, "float32") for n, shape in SHAPES.items()], 64)
    asked = []
    silent = Publication(5, plan, lambda names: asked.append(names))
    assert [silent.bucket(i) for i in range(silent.count)] == [None, None, None]
    assert asked == [["a"], ["b"], ["c"]]
    with pytest.raises(WeightsError, match="has buckets 0 to 2, asked for 3"):
        silent.bucket(3)
