"""A bucket's way by broadcast, from the sender to what vLLM's workers load: two threads, gloo between them."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from rlhf_ray.errors import WeightsError
from rlhf_ray.roles.generator import transfer_info
from rlhf_ray.weights.direct_sender import broadcast_route, open_sender
from rlhf_ray.weights.nccl_ipc_backend import VerifiedGlooEngine, offer_info
from rlhf_ray.weights.publication import SealedBuckets
from tests.unit.engine.listening_rank import listeners

TENSORS = {"a": torch.randn(40, 30), "b": torch.randn(7), "c": torch.randn(1000)}
SPECS = [(name, tuple(tensor.shape), "bfloat16") for name, tensor in TENSORS.items()]


class Model:
    def __init__(self):
        self.loaded = {}

    def load_weights(self, weights):
        self.loaded |= dict(weights)


def engine_of(model):
    """vLLM's back-end of a generator's only worker."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0),
                             model_config=SimpleNamespace(hf_config=LlamaConfig()))
    return VerifiedGlooEngine(None, config, torch.device("cpu"), model)


class Both:
    """A sender and two receivers, met."""

    def __init__(self):
        route = broadcast_route(torch.device("cpu"), "127.0.0.1", world=3)
        self.models, self.failures = [Model(), Model()], []
        self.engines = [engine_of(model) for model in self.models]
        self.sealed = SealedBuckets(SPECS, TENSORS, 2500, lambda names: None)

        def meet():
            self.sender = open_sender(route, 0)

        infos = [engine.parse_init_info(transfer_info(route, i)) for i, engine in enumerate(self.engines, 1)]
        joins = [partial(e.init_transfer_engine, info) for e, info in zip(self.engines, infos, strict=True)]
        self.together(meet, *joins)

    def together(self, *works):
        def run(work):
            try:
                work()
            except Exception as error:
                self.failures.append(error)

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def publish(self, change=lambda offer: offer):
        for index in range(self.sealed.plan.whole.buckets):
            offer, tensors = self.sealed.offer(1, index, True, lambda names: {n: TENSORS[n] for n in names})
            offer = replace(change(offer), handles=self.sender.offer(tensors))
            receive = [partial(engine.update_weights, offer_info(offer)) for engine in self.engines]
            self.together(self.sender.send, *receive)
        self.sender.release()


@pytest.fixture
def both():
    return Both()


def test_every_receiver_gets_every_tensor_as_it_was_announced(both):
    assert both.sealed.plan.whole.buckets == 2
    both.publish()
    assert not both.failures
    for model in both.models:
        assert model.loaded.keys() == TENSORS.keys()
        assert all(torch.equal(model.loaded[name], tensor.bfloat16()) for name, tensor in TENSORS.items())


def test_nothing_listens_on_another_address_than_the_learner_s_node(monkeypatch):
    """Sender and receivers are threads of this process, so all listeners are its own."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # so that it is restored, whatever is set
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    before = set(listeners())
    met = Both()
    assert not met.failures
    opened = set(listeners()) - before
    assert len(opened) > 3 and {host for host, _ in opened} == {"127.0.0.1"}


def test_a_tensor_with_another_digest_reaches_no_model(both):
    both.publish(lambda offer: replace(offer, digests=["0" * 32, *offer.digests[1:]]))
    assert len(both.failures) == 2 * both.sealed.plan.whole.buckets, "and nobody is left waiting"
    assert all(isinstance(error, WeightsError) and "arrived with digest" in str(error) for error in both.failures)
    assert "a" not in both.models[0].loaded
