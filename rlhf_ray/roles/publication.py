"""The trained model as others get it: exported in Hugging Face format, or published to the generators."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_ray.checkpoint.export import export_adapter, export_model
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.engine.deepspeed_engine import TrainEngine
from rlhf_ray.engine.saved_weights import SavedWeights
from rlhf_ray.errors import NoWeightsPlan
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.lora import Adapters
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import WeightBucket, WeightOffer, WeightRoute, WeightsPlan
from rlhf_ray.weights.manifest import TensorSpec, expand_fused_groups, torch_dtype
from rlhf_ray.weights.publisher import Publisher

if TYPE_CHECKING:
    from rlhf_ray.weights.direct_sender import Sender

Gather = Callable[[list[str], bool], dict[str, Tensor]]
"""As `TrainEngine.gather`."""


class PublishedTensors(ABC):
    """One rank's view of tensors that are computed from the trained module's parameters.

    Gathering is a collective call under ZeRO-3 (`lockstep`).
    """

    def __init__(self, engine: TrainEngine | SavedWeights, rank: int, lockstep: bool) -> None:
        self.device, self._engine = engine.device, engine
        self._rank, self._lockstep = rank, lockstep

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Name, shape and precision of every tensor, in a fixed order."""

    @abstractmethod
    def changing(self) -> list[str]:
        """Names of the tensors that training changes."""

    def gather(self, names: list[str], source: Gather | None = None) -> dict[str, Tensor] | None:
        """Whole tensors by name, on the device of the parameters; None on other ranks than 0.

        Args:
            source: returns other parameters than the current ones.
        """
        if source is None and self._rank and not self._lockstep:
            return None
        parameters = (source or self._engine.gather)(self._sources(names), not self._rank)
        return None if self._rank else self._computed(names, parameters)

    def gather_everywhere(self, names: list[str]) -> dict[str, Tensor]:
        """As `gather`, on every rank."""
        return self._computed(names, self._engine.gather(self._sources(names)))

    @abstractmethod
    def _sources(self, names: list[str]) -> list[str]:
        """Names of the parameters that these tensors are computed from."""

    @abstractmethod
    def _computed(self, names: list[str], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, from whole parameters."""


class PublishedModel(PublishedTensors):
    """The model in its own precision, under the base model's names, with adapters merged in."""

    def __init__(self, engine: TrainEngine | SavedWeights, adapters: Adapters | None,
                 model: ModelConfig | NewModelConfig, rank: int, lockstep: bool) -> None:
        """`model`: its precision and tokenizer are those of the published model."""
        super().__init__(engine, rank, lockstep)
        self._adapters, self._model = adapters, model

    def specs(self) -> list[TensorSpec]:
        """Name, shape and precision of every parameter, in a fixed order."""
        shapes = self._engine.parameter_shapes()
        return [(name, shape, self._model.dtype)
                for name, shape in (self._adapters.base_shapes(shapes) if self._adapters else shapes)]

    def changing(self) -> list[str]:
        """Names of the parameters that training changes."""
        trained = {name for name, p in self._engine.module.model.named_parameters() if p.requires_grad}
        return [name for name, *_ in self.specs() if trained.intersection(self._sources([name]))]

    def export(
        self, directory: str, card: ModelCardInfo, term: Term | None = None, source: Gather | None = None
    ) -> None:
        """Write the model in Hugging Face format (rank 0; all ranks take part in gathering it).

        Args:
            source: as for `gather`.
        """
        state = {}
        for name, _, dtype in self.specs():
            gathered = self.gather([name], source) or {}
            state.update({name: t.to(torch_dtype(dtype)).cpu() for name, t in gathered.items()})
        if self._rank:
            return
        inner = self._engine.module.model
        with torch.device("meta"):
            skeleton = type(inner)(inner.config)
        kept = skeleton.state_dict().keys()  # training does not change buffers, such as DeepSeek's router bias
        state.update({name: buffer.cpu() for name, buffer in inner.named_buffers() if name in kept})
        if hasattr(inner, "generation_config"):
            skeleton.generation_config = inner.generation_config
        export_model(skeleton, state, load_tokenizer(self._model), Path(directory), card, term=term)

    def export_adapter(self, directory: str, card: ModelCardInfo, term: Term | None = None) -> None:
        """Write only the adapters, in peft's format (rank 0; all ranks take part in gathering them).

        Raises:
            ValueError: the model is trained without adapters.
        """
        adapters = self._adapters
        if adapters is None:
            raise ValueError("there are no adapters to export; set `lora`, or use `export`")
        if self._rank and not self._lockstep:
            return
        trained = self._engine.gather(adapters.trained_names(self._engine.parameter_shapes()), not self._rank)
        if self._rank == 0:
            state = adapters.peft_state({name: tensor.cpu() for name, tensor in trained.items()})
            export_adapter(adapters.peft_config, state, Path(directory), card, term)

    def _sources(self, names: list[str]) -> list[str]:
        return self._adapters.sources(names) if self._adapters else names

    def _computed(self, names: list[str], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._adapters.merged(names, parameters) if self._adapters else parameters


class PublishedAdapters(PublishedTensors):
    """The adapters alone, in the model's own precision (see `Adapters.published`)."""

    def __init__(self, engine: TrainEngine, adapters: Adapters, dtype: str, rank: int, lockstep: bool) -> None:
        super().__init__(engine, rank, lockstep)
        self._adapters, self._dtype = adapters, dtype

    def specs(self) -> list[TensorSpec]:
        """As `PublishedTensors.specs`."""
        return [(name, shape, self._dtype)
                for name, shape in self._adapters.published_shapes(self._engine.parameter_shapes())]

    def changing(self) -> list[str]:
        """As `PublishedTensors.changing`: all."""
        return [name for name, *_ in self.specs()]

    def _sources(self, names: list[str]) -> list[str]:
        return self._adapters.published_sources(names)

    def _computed(self, names: list[str], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._adapters.published(names, parameters)


class Publication:
    """One rank's part of sending the weights.

    Raises:
        NoWeightsPlan: by methods that need one, if `plan` was not called.
    """

    def __init__(self, rank: int, lockstep: bool) -> None:
        self._rank, self._lockstep = rank, lockstep
        self.model: PublishedTensors
        self._publisher: Publisher | None = None
        self._sender: Sender | None = None

    def plan(self, bucket_bytes: int, fused_groups: list[list[str]]) -> WeightsPlan:
        """Plan publications in buckets of at most `bucket_bytes`.

        Args:
            fused_groups: names of tensors that a generator can only replace together.
        """
        changing = expand_fused_groups(self.model.changing(), fused_groups)
        self._publisher = Publisher(self.model.specs(), changing, bucket_bytes, self.model.gather)
        return self._publisher.plan

    def bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:
        """One bucket of the current weights, on rank 0; the others take part in gathering it. Collective under ZeRO-3.

        Args:
            whole: the publication contains all tensors.
        """
        return self._planned().bucket(version, index, whole)

    def broadcast_route(self, host: str, world: int) -> WeightRoute:
        """How a broadcast from this process to `world` - 1 others is joined; `host` is this node's address."""
        from rlhf_ray.weights.direct_sender import broadcast_route

        return broadcast_route(self.model.device, host, world)

    def connect(self, route: WeightRoute) -> None:
        """Prepare to send weights from GPU to GPU; waits for the generators of a broadcast."""
        from rlhf_ray.weights.direct_sender import open_sender

        self.disconnect()
        self._sender = open_sender(route, self._rank)

    def disconnect(self) -> None:
        """Leave the generators, if connected."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def offer(self, version: int, index: int, whole: bool = True) -> WeightOffer | None:
        """As `bucket`, but the bytes stay on the GPU until generators read them or `send` sends them. A collective call
        under ZeRO-3, and if every rank supplies handles."""
        if self._sender is None and not self._lockstep:
            return None
        publisher = self._planned()
        offer, tensors = publisher.offer(version, index, whole, self.model.gather_everywhere)
        handles = self._sender.offer(tensors) if self._sender else []
        return None if self._rank else replace(offer, handles=handles)

    def send(self) -> None:
        """Broadcast the offered bucket."""
        if self._sender is not None:
            self._sender.send()

    def release(self) -> None:
        """Free the offered buckets at the end of a publication."""
        if self._sender is not None:
            self._sender.release()

    def unchanged(self) -> dict[str, str] | None:
        """Digests of the tensors that training does not change, on rank 0; errors as in `Publisher.unchanged`."""
        return None if self._rank else self._planned().unchanged()

    def _planned(self) -> Publisher:
        if self._publisher is None:
            raise NoWeightsPlan("this learner has no plan for publishing its weights; call plan_weights first")
        return self._publisher
