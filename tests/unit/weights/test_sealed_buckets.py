"""What the sending side plans, gathers and leaves out."""

import pytest
import torch

from rlhf_ray.errors import TrainingError, WeightsError
from rlhf_ray.records import PublicationSize
from rlhf_ray.weights.manifest import expand_fused_groups, fused_groups
from rlhf_ray.weights.publication import SealedBuckets

SPECS = [("a", (3, 4), "float32"), ("b", (5,), "float32"), ("c", (2, 2), "float32")]
LAYER = "model.layers.0.self_attn"


def test_one_bucket_is_gathered_at_a_time_and_ranks_that_do_not_send_give_nothing():
    asked = []
    silent = SealedBuckets(SPECS, {"a", "b", "c"}, 20, lambda names: asked.append(names))
    assert [silent.bucket(5, i) for i in range(3)] == [None, None, None]
    assert asked == [["a"], ["b"], ["c"]]
    with pytest.raises(WeightsError, match="has buckets 0 to 2, not 3"):
        silent.bucket(5, 3)


def test_what_does_not_change_is_neither_gathered_nor_counted():
    asked, tensors = [], {name: torch.ones(shape) for name, shape, _ in SPECS}

    def gather(names):
        asked.extend(names)
        return tensors

    sealed = SealedBuckets(SPECS, {"a", "c"}, 1000, gather)
    assert sealed.plan.whole == PublicationSize(1, 84) and sealed.plan.changing == PublicationSize(1, 64)
    with pytest.raises(WeightsError, match="1 tensors were never published"):
        sealed.unchanged()
    whole = sealed.bucket(5, 0)
    asked.clear()
    assert [entry.name for entry in sealed.bucket(6, 0, whole=False).entries] == ["a", "c"] == asked
    assert sealed.unchanged() == {"b": whole.digests[1]}


def test_tensors_of_one_fused_layer_go_together():
    names = [f"{LAYER}.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")]
    groups = fused_groups([*names, "model.norm.weight"], {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert groups == [names[:6], names[6:]]
    assert expand_fused_groups({f"{LAYER}.v_proj.weight", "model.norm.weight"}, groups) == {
        *names[:6], "model.norm.weight"}


def test_experts_of_one_layer_go_together():
    names = [f"model.layers.{layer}.mlp.experts.{i}.w{j}.weight" for layer in (0, 1) for i in (0, 1) for j in (1, 2)]
    assert fused_groups(names, {}) == [names[:4], names[4:]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("send", ["bucket", "offer"])
def test_weights_that_are_not_finite_are_not_published(value, send):
    tensors = {name: torch.ones(shape) for name, shape, _ in SPECS}
    tensors["b"][3] = value
    sealed = SealedBuckets(SPECS, {"a", "b", "c"}, 50, lambda names: tensors)
    publish = sealed.bucket if send == "bucket" else lambda *at: sealed.offer(*at, True, lambda names: tensors)
    publish(5, 0)
    with pytest.raises(TrainingError, match="weights version 5 are not published: tensor 'b' is not finite"):
        publish(5, 1)


def test_what_becomes_infinite_in_the_precision_of_the_generators_is_not_published():
    large = SealedBuckets([("a", (2,), "float16")], {"a"}, 50, lambda names: {"a": torch.tensor([1.0, 1e6])})
    with pytest.raises(TrainingError, match="tensor 'a' is not finite"):
        large.bucket(5, 0)
