"""Of transports between GPUs, what a CPU can show: handles without pickle, loaders that verify, vLLM's trainers."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import WeightRoute
from rlhf_ray.roles.generator import transfer_info
from rlhf_ray.weights.direct_transport import handle_arguments, plain_handle
from rlhf_ray.weights.manifest import plan_buckets
from rlhf_ray.weights.nccl_ipc_backend import VerifiedGlooEngine
from rlhf_ray.weights.publication import SealedBuckets
from rlhf_ray.weights.receiver import Receiver

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
SPECS = [(name, tuple(tensor.shape), "bfloat16") for name, tensor in TENSORS.items()]


@pytest.fixture
def offer():
    """An offer of both tensors in bfloat16, and what the sender would send."""
    sealed = SealedBuckets(SPECS, TENSORS, 1000, lambda names: None)
    return sealed.offer(3, 0, True, lambda names: {name: TENSORS[name] for name in names})


class TestHandles:
    ARGUMENTS = (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.UntypedStorage, torch.bfloat16, 0, b"\x00\xff" * 32,
                 1024, 512, False, b"ref", 8, b"event", True)

    def test_they_travel_as_text_and_come_back(self):
        assert handle_arguments(json.loads(json.dumps(plain_handle(self.ARGUMENTS)))) == self.ARGUMENTS

    def test_others_are_refused(self):
        with pytest.raises(WeightsError, match=r"in 14 parts .* object_store"):
            plain_handle(self.ARGUMENTS[:-1])
        with pytest.raises(WeightsError, match="3 parts"):
            handle_arguments([1, 2, 3])


class TestOffers:
    def test_tensors_are_offered_as_they_are_announced(self, offer):
        said, tensors = offer
        assert [(e.name, e.dtype) for e in said.entries] == [("a", "bfloat16"), ("b", "bfloat16")]
        assert all(t.dtype == torch.bfloat16 for t in tensors.values())

    def test_a_receiver_takes_the_description_and_is_whole_with_it(self, offer):
        receiver = Receiver("g", 0, {name: tuple(t.shape) for name, t in TENSORS.items()}, list)
        receiver.begin(3, 1)
        receiver.expect(offer[0])
        receiver.finish(3)
        assert receiver.confirm() == 3

    def test_a_changed_description_is_refused(self, offer):
        from dataclasses import replace

        for change in ({"digests": ["0", "1"]}, {"version": 4}, {"index": 1}, {"entries": offer[0].entries[:1]}):
            receiver = Receiver("g", 0, {name: tuple(t.shape) for name, t in TENSORS.items()}, list)
            receiver.begin(3, 1)
            with pytest.raises(WeightsError):
                receiver.expect(replace(offer[0], **change))
            with pytest.raises(WeightsError):
                receiver.finish(3)

    def test_what_was_sent_once_may_be_left_out_by_its_digest(self):
        sealed = SealedBuckets(SPECS, ["a"], 1000, lambda names: None)
        sealed.offer(1, 0, True, lambda names: {name: TENSORS[name] for name in names})
        assert sealed.unchanged().keys() == {"b"}
        assert [e.name for e in sealed.offer(2, 0, False, lambda names: TENSORS)[0].entries] == ["a"]


class TestLoader:
    @pytest.fixture
    def loader(self, offer):
        from transformers import LlamaConfig

        from rlhf_ray.weights.nccl_ipc_backend import OfferInfo, VerifyingLoader, offer_info

        class Model:
            loaded: dict = {}

            def load_weights(self, weights):
                self.loaded |= dict(weights)

        return Model(), lambda model: VerifyingLoader(
            model, LlamaConfig(), OfferInfo(**json.loads(json.dumps(offer_info(offer[0])))))

    def test_what_arrives_is_verified_before_the_model_has_it(self, loader, offer):
        model, load = loader
        tensors = dict(offer[1])
        it = load(model)
        it.load_weights(list(tensors.items())[:1])
        with pytest.raises(WeightsError, match="'b' among them"):
            it.require_all()
        it.load_weights(list(tensors.items())[1:])
        it.require_all()
        assert torch.equal(model.loaded["a"], tensors["a"])
        with pytest.raises(WeightsError, match="arrived twice"):
            it.load_weights([("a", tensors["a"])])
        model.loaded.clear()
        with pytest.raises(WeightsError, match="arrived with digest"):
            load(model).load_weights([("a", tensors["a"] + 1)])
        assert not model.loaded


class TestTrainers:
    def test_a_bucket_is_what_vllm_takes_for_a_source_of_weights(self):
        from rlhf_ray.weights.direct_sender import BucketSource

        bucket = BucketSource()
        bucket.tensors = TENSORS
        assert [(m.name, m.dtype, m.shape) for m in bucket.metadata()] == [
            ("a", torch.float32, (2, 3)), ("b", torch.float32, (4,))]
        assert [names for names, _ in bucket.iter_groups()] == bucket.groups()

    def test_the_client_that_vllm_s_trainers_get_has_all_that_they_call(self):
        from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

        from rlhf_ray.weights.direct_sender import NullSyncClient

        assert isinstance(NullSyncClient(), VLLMWeightSyncClient)

    def test_other_ranks_send_nothing_but_handles(self):
        from rlhf_ray.weights.direct_sender import open_sender

        assert open_sender(WeightRoute("nccl", 2), rank=1) is None

    def test_nccl_s_id_travels_with_the_route_and_opens_no_store(self, monkeypatch):
        """vLLM's own way gives a host and a port to `StatelessProcessGroup`, which unpickles what its store holds."""
        from vllm.distributed.utils import StatelessProcessGroup

        from rlhf_ray.weights import direct_sender

        class Library:
            def ncclGetUniqueId(self):
                return ncclUniqueId.from_buffer_copy(bytes(range(128)))

        joined = []
        monkeypatch.setattr(direct_sender, "NCCLLibrary", Library)
        monkeypatch.setattr(direct_sender, "uid_init_process_group", lambda *given: joined.append(given))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        for store in (torch.distributed.TCPStore, StatelessProcessGroup):
            monkeypatch.setattr(store, "__init__", lambda *_, **__: pytest.fail("a store was opened"))
        route = direct_sender.broadcast_route(torch.device("cuda"), "127.0.0.1", 3)
        assert (route.transport, route.world, route.address) == ("nccl", 3, "") and route.nccl_id not in repr(route)
        direct_sender.open_sender(route, 0)
        assert joined == [(bytes(range(128)), 0, 3, 0)]

    def test_back_ends_are_known_to_vllm_by_their_names(self):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from rlhf_ray.weights.object_store_backend import backend_name

        names = [backend_name("object_store", 1), backend_name("nccl", 1), backend_name("ipc", 0.5),
                 backend_name("nccl", 0)]
        assert names == ["object_store", "verified_nccl", "verified_ipc", "verified_gloo"]
        classes = [WeightTransferEngineFactory._registry[name]() for name in names]
        assert len({cls.__name__ for cls in classes}) == 4
        for cls in classes[1:3]:
            assert cls.update_info_cls.__name__ == "OfferInfo"
            assert cls.__mro__[2].__module__.startswith("vllm.")


class Communicator:
    """In the place of vLLM's `PyNcclCommunicator`, which nobody but its engine's `shutdown` gives back."""

    given_back = False

    def destroy(self):
        self.given_back = True


class TestMeetingAgain:
    """A learner that is joined to other generators than before leaves those it was joined to."""

    @pytest.fixture
    def learner(self, monkeypatch):
        from rlhf_ray.config.algorithm import AlgorithmConfig
        from rlhf_ray.config.learner import PolicyConfig
        from rlhf_ray.config.model import ModelConfig
        from rlhf_ray.roles.policy_learner import PolicyLearner

        made = PolicyLearner(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, AlgorithmConfig(), 1.0)
        made.engine = SimpleNamespace(device=torch.device("cuda"))
        return made

    @pytest.fixture
    def communicators(self, monkeypatch):
        """Those of all connections; vLLM's own trainer engine around each."""
        from rlhf_ray.weights import direct_sender

        found = []

        def join(*_):
            assert all(other.given_back for other in found), "two at a time take the memory of two"
            found.append(Communicator())
            return found[-1]

        monkeypatch.setattr(direct_sender, "uid_init_process_group", join)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        return found

    def test_nccl_s_communicator_is_given_back_each_time_and_at_the_end(self, learner, communicators):
        for world in (3, 2, 3):
            learner.connect_weights(WeightRoute("nccl", world))
        assert [it.given_back for it in communicators] == [True, True, False]
        learner.leave()
        assert communicators[-1].given_back

    def test_a_meeting_that_fails_leaves_nothing_to_give_back_twice(self, learner, communicators, monkeypatch):
        from rlhf_ray.weights import direct_sender

        learner.connect_weights(WeightRoute("nccl", 2))
        monkeypatch.setattr(direct_sender, "open_sender", lambda *_: (_ for _ in ()).throw(RuntimeError("nobody came")))
        with pytest.raises(RuntimeError, match="nobody came"):
            learner.connect_weights(WeightRoute("nccl", 2))
        communicators[0].given_back = False
        learner.leave()
        assert not communicators[0].given_back

    def test_so_do_both_sides_of_gloo_s(self, learner, monkeypatch):
        from rlhf_ray.weights import direct_sender

        senders, open_it = [], direct_sender.open_sender
        monkeypatch.setattr(direct_sender, "open_sender", lambda *args: senders.append(open_it(*args)) or senders[-1])
        learner.engine = SimpleNamespace(device=torch.device("cpu"))
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
        receiver = VerifiedGlooEngine(None, config, torch.device("cpu"), None)
        broadcasts = []
        for _ in range(2):
            route = learner.broadcast_route("127.0.0.1", 2)
            info = receiver.parse_init_info(transfer_info(route, 1))
            joining = threading.Thread(target=receiver.init_transfer_engine, args=(info,))
            joining.start()
            learner.connect_weights(route)
            joining.join(60)
            broadcasts.append(receiver._broadcast)
        for send in (lambda: senders[0]._broadcast(torch.ones(1)), lambda: broadcasts[0](torch.ones(1))):
            with pytest.raises(RuntimeError, match="has left its broadcast"):
                send()


def test_plans_are_the_same_for_every_transport():
    sealed = SealedBuckets(SPECS, TENSORS, 12, lambda names: TENSORS)
    assert sealed.plan.whole.buckets == len(plan_buckets(SPECS, 12)) == 2
