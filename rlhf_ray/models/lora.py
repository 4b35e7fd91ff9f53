"""Low-rank adapters (Hu et al. 2021) on a model's frozen linear layers, and the merged weights they give.

peft adds the adapters to the model in place: it keeps its class, its forward pass and the names of its layers. A
learner exports the base model's tensors, each merged on demand: W + alpha/rank * B A. It publishes the same tensors or,
where vLLM computes with adapters (`config.adapter_publication`), A and alpha/rank * B. The trained parameters stay
separate, and there is no second model. Checkpoints hold the adapters without the frozen base, which
is loaded from its source again; a digest in `adapters.json` checks that it is the same.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.errors import CheckpointError, ModelError
from rlhf_ray.models.loading import meta_model
from rlhf_ray.models.lora_targets import (
    HEAD,
    chosen_layers,
    last_names,
    linear_layers,
    shortest_targets,
    stored_transposed,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAME = "default"
"""peft's name of the only adapter."""
A, B, BASE = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight", ".base_layer."

Shapes = list[tuple[str, tuple[int, ...]]]
ADAPTERS_FILE = "adapters.json"


@dataclass(frozen=True)
class AdaptedLayer:
    """How a layer's adapter is merged into its weight."""

    scaling: float
    """alpha / rank."""
    transposed: bool
    """The weight is stored [in, out] (GPT-2) and not [out, in]."""


class Adapters:
    """The adapters of one model. Its scalar head, if it has one, is trained in full."""

    def __init__(self, model: "PreTrainedModel", config: LoRAConfig, base: str, autocast: bool = False) -> None:
        """Freeze `model` and add adapters to it. They have no effect at first: A is random, B zero.

        Args:
            base: path or Hub name of the model, written to exported adapters.
            autocast: whether all passes run under autocast, which converts what enters the adapters. Otherwise peft
                converts it to float32.

        Raises:
            ModelError: a target is not a layer of the model (see `lora_targets.chosen_layers`), or is also the name of
                fused experts.
        """
        from peft import LoraConfig, TaskType, inject_adapter_in_model

        self.config, self.head = config, hasattr(model, HEAD)
        self.base_digest = digest((n, p) for n, p in model.named_parameters() if not self._in_head(n))
        names = chosen_layers(model, config.targets)
        self.peft_config = LoraConfig(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, bias="none",
            target_modules=shortest_targets(model, names), fan_in_fan_out=stored_transposed(model, names),
            base_model_name_or_path=base, task_type=TaskType.SEQ_CLS if self.head else TaskType.CAUSAL_LM,
        )
        inject_adapter_in_model(self.peft_config, model, NAME)
        if self.head:
            self.peft_config.modules_to_save = [HEAD]
            getattr(model, HEAD).requires_grad_(True)
        for parameter in model.parameters():
            if parameter.requires_grad:  # always float32: small updates vanish in bfloat16
                parameter.data = parameter.data.float()
        self._modules = dict(_adapted(model))
        for layer in self._modules.values():
            layer.cast_input_dtype_enabled = not autocast
        if others := sorted(self._modules.keys() - set(names)):  # of some families, where a target is called as experts
            raise ModelError(
                f"lora.targets={config.targets} would also put adapters on the fused experts ({others[0]}, ...), whose "
                "merged weights are not computed; name layers that experts do not have, such as those of attention: "
                f"{', '.join(last_names(n for n in names if 'attn' in n)) or 'q_proj, v_proj'}")
        self.layers = {name: AdaptedLayer(layer.scaling[NAME], bool(layer.fan_in_fan_out))
                       for name, layer in self._modules.items()}
        self._published = {name_in_file(name + kind): name + kind for name in self.layers for kind in (A, B)}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is its frozen base; do not compute gradients."""
        try:
            for layer in self._modules.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self._modules.values():
                layer.enable_adapters(True)

    def base_shapes(self, shapes: Shapes) -> Shapes:
        """Names and shapes of the base model's parameters, given those of the model with adapters."""
        return [(name.replace(BASE, "."), shape) for name, shape in shapes if not name.endswith((A, B))]

    def trained_names(self, shapes: Shapes) -> list[str]:
        """Names of the trained parameters: adapters and the scalar head."""
        return [name for name, _ in shapes if name.endswith((A, B)) or self._in_head(name)]

    def sources(self, names: Iterable[str]) -> list[str]:
        """Names of the parameters from which these base parameters are merged."""
        return [source for name in names for source in self._sources(name)]

    def merged(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Base parameters by name with their adapters merged in (merged ones in float32); `tensors` are not changed.

        Args:
            tensors: the parameters `sources(names)`, whole and on one device.
        """
        whole = {}
        for name in names:
            source, *factors = self._sources(name)
            whole[name] = tensors[source]
            if factors:
                a, b = (tensors[factor].float() for factor in factors)
                layer = self.layers[name.rpartition(".")[0]]
                delta = b @ a
                whole[name] = whole[name].float() + layer.scaling * (delta.T if layer.transposed else delta)
        return whole

    def peft_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Trained parameters under the names in peft's files."""
        return {name_in_file(name): tensor for name, tensor in tensors.items()}

    def published_shapes(self, shapes: Shapes) -> Shapes:
        """Names and shapes of the tensors that `published` returns, given those of the model's parameters."""
        return [(name_in_file(name), shape) for name, shape in shapes if name.endswith((A, B))]

    def published_sources(self, names: Iterable[str]) -> list[str]:
        """Names of the parameters that `published` needs for these tensors."""
        return [self._published[name] for name in names]

    def published(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A, and alpha/rank * B, under their names in peft's files.

        Args:
            tensors: the parameters `published_sources(names)`, whole.
        """
        whole = {}
        for name, source in zip(names, self.published_sources(names), strict=True):
            scaling = self.layers[source.removesuffix(B)].scaling if source.endswith(B) else 1.0
            whole[name] = scaling * tensors[source].float()
        return whole

    def describe(self) -> dict[str, Any]:
        """The base model and the adapters' shape, without which saved adapters cannot be used."""
        return {"base": self.base_digest, "rank": self.config.rank, "alpha": self.config.alpha,
                "layers": sorted(self.layers)}

    def _in_head(self, name: str) -> bool:
        return self.head and name.startswith(f"{HEAD}.")

    def _sources(self, name: str) -> list[str]:
        """The frozen parameter, followed by A and B for the weight of an adapted layer."""
        layer, _, kind = name.rpartition(".")
        if layer not in self.layers:
            return [name]
        return [f"{layer}{BASE}{kind}", *([layer + A, layer + B] if kind == "weight" else [])]


def name_in_file(name: str) -> str:
    """The name of a trained parameter in peft's files."""
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"


def layer_in_file(name: str) -> str:
    """The layer of the model that a tensor of `adapter_shapes` belongs to."""
    return name.removeprefix("base_model.model.").rpartition(".lora_")[0]


def adapter_shapes(
    model: "PretrainedConfig", config: LoRAConfig, trust_remote_code: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `Adapters.published` returns for a language model of this configuration,
    without its weights.

    Raises:
        ModelError: as `lora_targets.chosen_layers`.
    """
    skeleton = meta_model(model, trust_remote_code)
    layers = linear_layers(skeleton)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in chosen_layers(skeleton, config.targets):
        outputs, inputs = layers[name].weight.shape
        shapes |= {name_in_file(name + A): (config.rank, inputs), name_in_file(name + B): (outputs, config.rank)}
    return shapes


def digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """XXH3-128 hex digest over names, dtypes, shapes and bytes of parameters."""
    whole = xxhash.xxh3_128()
    for name, parameter in parameters:
        whole.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        whole.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    yield from ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))


def save_adapter_description(adapters: Adapters, file: Path) -> None:
    """Write `adapters.json`: the base's digest, rank, alpha and layers."""
    file.write_text(json.dumps(adapters.describe()))


def check_adapter_description(adapters: Adapters | None, directory: Path) -> None:
    """Reject a checkpoint whose adapters do not fit this learner.

    Raises:
        CheckpointError: only one of the two has adapters, or base, rank, alpha or layers differ.
    """
    file = directory / ADAPTERS_FILE
    saved = json.loads(file.read_text()) if file.is_file() else None
    if (saved is None) != (adapters is None):
        had, has = ("without", "has `lora`") if saved is None else ("with", "has no `lora`")
        raise CheckpointError(f"{directory} was written {had} adapters, but the configuration {has}; restore that "
                              "setting, or start a new run")
    if saved is None or adapters is None:
        return
    now = adapters.describe()
    if saved["base"] != now["base"]:
        raise CheckpointError(f"{directory} holds adapters of another base model: its weights had digest "
                              f"{saved['base']}, those of {adapters.peft_config.base_model_name_or_path!r} have "
                              f"{now['base']}. Restore the model that the run started with (path and dtype), or start "
                              "a new run")
    changed = [name for name in now if saved[name] != now[name]]
    if changed:
        raise CheckpointError(f"{directory} holds adapters of another shape: "
                              + "; ".join(f"{name} was {saved[name]} and is {now[name]}" for name in changed)
                              + ". Restore `lora`, or start a new run")
