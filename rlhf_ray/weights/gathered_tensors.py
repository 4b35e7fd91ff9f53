"""The trained model as others get it: whole tensors, gathered from the ranks, for exports and for the generators."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rlhf_ray.checkpoint.export import export_adapter, export_model
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.engine.deepspeed_engine import TrainEngine
from rlhf_ray.engine.saved_weights import SavedWeights
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.lora import Adapters
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.weights.manifest import TensorSpec, torch_dtype

GatherParameters = Callable[[list[str], bool], dict[str, Tensor]]
"""As `TrainEngine.gather`: the module's own parameters by name, and whether this rank needs them."""


class GatheredTensors(ABC):
    """One rank's view of tensors that are computed from the trained module's parameters.

    Gathering is a collective call under ZeRO-3 (`lockstep`).

    Example::

        model = GatheredModel(engine, adapters=None, model=config.model, rank=rank, lockstep=False)
        names = [name for name, shape, dtype in model.specs()]
        tensors = model.gather(names[:8])  # None on other ranks than 0
    """

    def __init__(self, engine: TrainEngine | SavedWeights, rank: int, lockstep: bool) -> None:
        self._engine = engine
        self._rank = rank
        self._lockstep = lockstep

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Name, shape and precision of every tensor, in a fixed order."""

    @abstractmethod
    def changing(self) -> list[str]:
        """Names of the tensors that training changes."""

    def gather(self, names: list[str], source: GatherParameters | None = None) -> dict[str, Tensor] | None:
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


class GatheredModel(GatheredTensors):
    """The model in its own precision, under the base model's names, with adapters merged in."""

    def __init__(self, engine: TrainEngine | SavedWeights, adapters: Adapters | None,
                 model: ModelConfig | NewModelConfig, rank: int, lockstep: bool) -> None:
        """`model`: its precision and tokenizer are those of the published model."""
        super().__init__(engine, rank, lockstep)
        self._adapters = adapters
        self._model = model

    def specs(self) -> list[TensorSpec]:
        """Name, shape and precision of every parameter, in a fixed order."""
        shapes = self._engine.parameter_shapes()
        if self._adapters:
            shapes = self._adapters.base_shapes(shapes)
        return [(name, shape, self._model.dtype) for name, shape in shapes]

    def changing(self) -> list[str]:
        """Names of the parameters that training changes."""
        trained = {name for name, p in self._engine.module.model.named_parameters() if p.requires_grad}
        return [name for name, *_ in self.specs() if trained.intersection(self._sources([name]))]

    def export(
        self, directory: str, card: ModelCardInfo, term: Term | None = None, source: GatherParameters | None = None
    ) -> None:
        """Write the model in Hugging Face format (rank 0; all ranks take part in gathering it).

        Args:
            source: as for `gather`.
        """
        # The parameters, one at a time.
        state = {}
        for name, _, dtype in self.specs():
            gathered = self.gather([name], source) or {}
            state.update({name: t.to(torch_dtype(dtype)).cpu() for name, t in gathered.items()})
        if self._rank:
            return

        # The file's other parts: configuration, buffers and tokenizer.
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


class GatheredAdapters(GatheredTensors):
    """The adapters alone, in the model's own precision (see `Adapters.published`)."""

    def __init__(self, engine: TrainEngine, adapters: Adapters, dtype: str, rank: int, lockstep: bool) -> None:
        super().__init__(engine, rank, lockstep)
        self._adapters = adapters
        self._dtype = dtype

    def specs(self) -> list[TensorSpec]:
        """As `GatheredTensors.specs`."""
        return [(name, shape, self._dtype)
                for name, shape in self._adapters.published_shapes(self._engine.parameter_shapes())]

    def changing(self) -> list[str]:
        """As `GatheredTensors.changing`: all."""
        return [name for name, *_ in self.specs()]

    def _sources(self, names: list[str]) -> list[str]:
        return self._adapters.published_sources(names)

    def _computed(self, names: list[str], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._adapters.published(names, parameters)
