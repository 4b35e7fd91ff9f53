"""The base of all learners: the process group, the DeepSpeed engine, its state on disk, its weights in buckets."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_ray.checkpoint.export import export_adapter, export_model
from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.checkpoint.rng import rng_state, set_rng_state
from rlhf_ray.checkpoint.state_files import load_tensors
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.batching import rank_plan
from rlhf_ray.engine import distributed
from rlhf_ray.engine.deepspeed_engine import StepResult, TrainEngine
from rlhf_ray.errors import NoWeightsPlan
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.lora import ADAPTERS_FILE, Adapters, check_adapter_description, save_adapter_description
from rlhf_ray.models.packed_model import Chunks
from rlhf_ray.models.parity import ParityProbe, RowLimits
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import UpdateStats, WeightBucket, WeightOffer, WeightRoute, WeightsPlan, WorkerProfile
from rlhf_ray.roles.async_checkpoint import AsyncCheckpointWriter, SaveProgress
from rlhf_ray.roles.micro_batch import AverageMeter
from rlhf_ray.roles.profiling import TorchProfile
from rlhf_ray.weights.manifest import expand_fused_groups
from rlhf_ray.weights.publisher import Publisher

if TYPE_CHECKING:
    from torch import nn

    from rlhf_ray.weights.direct_sender import Sender

Gather = Callable[[list[str]], dict[str, Tensor]]
"""Returns whole parameters of the trained module by name."""


class Learner:
    """One rank of a trained model. Subclasses define which module is built and how it is updated."""

    def __init__(self, config: LearnerConfig, model: ModelConfig | NewModelConfig, rank: int, world: int, seed: int,
                 total_steps: int, longest: int | None = None) -> None:
        """Nothing heavy happens before `start`.

        Args:
            seed: seed of newly initialised weights; the same on all ranks.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            longest: maximum tokens of a row in this run; those of a micro-batch if None.
        """
        # Trained weights are always float32: small updates vanish in bfloat16. With adapters the frozen weights keep
        # their precision.
        own = {} if config.lora else {"dtype": "float32"}
        self.config, self.model_config = config, model.model_copy(update=own)
        self.published_dtype = model.dtype
        self.rank, self.world, self.seed = rank, world, seed
        self.total_steps, self.longest = total_steps, longest or config.micro_batch_tokens
        self.adapters: Adapters | None = None
        self._saving = AsyncCheckpointWriter()
        self._profile = TorchProfile()
        self._sender: Sender | None = None
        self._publisher: Publisher | None = None
        self.last_update: UpdateStats | None = None
        """The last update since this process started or loaded a checkpoint."""

    def rendezvous(self, host: str) -> str:
        """An address at which the ranks can join; called on rank 0, whose node others reach at `host`."""
        return distributed.free_address(host)

    def start(self, address: str, timeout_s: float) -> dict[str, float]:
        """Join the other ranks, build the module, wrap it in DeepSpeed, and compare its passes with transformers' own.

        Args:
            timeout_s: longest wait of any collective call for the other ranks, in seconds.

        Returns:
            pid, seconds, numbers of parameters (`parameters` in total, `trained` of them), and the result of
            `ParityProbe.check`.

        Raises:
            ModelError: the model cannot be loaded, or packed passes do not compute it.
        """
        began = time.perf_counter()
        distributed.join(address, self.rank, self.world, timeout_s)
        torch.manual_seed(self.seed)
        module = self.build()
        if self.config.lora:
            self.adapters = Adapters(module.model, self.config.lora, str(getattr(self.model_config, "path", "")))
            torch.manual_seed(self.seed + self.rank)  # ranks use different adapter dropout
        sizes = {"parameters": sum(p.numel() for p in module.parameters()),
                 "trained": sum(p.numel() for p in module.parameters() if p.requires_grad)}
        self.engine = TrainEngine(module, self.config, self.total_steps)
        probe = ParityProbe(
            module, RowLimits.of(module.model.config, self.longest, self.config.micro_batch_tokens), self.engine.device,
            gradients=True, call=self.engine.forward_without_engine,
            largest=distributed.largest_of_ranks if self.lockstep else None)
        compared = probe.check(f"{type(self).__name__} of {getattr(self.model_config, 'path', 'a new model')!r}")
        self.engine.release_gathered()
        return {"pid": os.getpid(), "seconds": time.perf_counter() - began, **sizes, **compared}

    def build(self) -> "nn.Module":
        """The packed module to train."""
        raise NotImplementedError

    def loss(self, part: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of some rows, with its graph, and statistics that are means over the same rows."""
        raise NotImplementedError

    def count(self, part: Any) -> float:
        """Number of tokens, rows or pairs that the loss of some rows is a mean over."""
        raise NotImplementedError

    def measured(self, part: Any) -> float:
        """Number of items that the statistics of some rows are means over, if it differs from `count`."""
        return self.count(part)

    def optimize(self, mini_batch: Any, meter: AverageMeter) -> StepResult:
        """One optimizer step on a mini-batch that every rank holds whole; each processes its share of the rows.

        The result does not depend on the number of ranks or on `micro_batch_tokens`.
        """
        return self.engine.step(self._shares(mini_batch, meter))

    def _shares(self, mini_batch: Any, meter: AverageMeter) -> Iterator[Tensor]:
        """This rank's parts of the mini-batch's loss; the sum over all ranks and micro-batches is the loss."""
        for rows in rank_plan(mini_batch.lengths, self.world, self.config.micro_batch_tokens)[self.rank]:
            # A rank without rows left takes part in the collective calls with any row and a loss of weight zero.
            part = mini_batch.select(rows if len(rows) else [0])
            yield self.share(part, mini_batch, len(rows) > 0, meter)

    def share(self, part: Any, whole: Any, counted: bool, meter: AverageMeter) -> Tensor:
        """The contribution of some rows to the loss of a mini-batch; zero if they are not counted."""
        loss, stats = self.loss(part)
        weight = self.count(part) if counted else 0.0
        meter.add(weight, {"loss": loss.detach()})
        meter.add(self.measured(part) if counted else 0.0, stats)
        return loss * (weight / self.count(whole))

    @property
    def lockstep(self) -> bool:
        """Whether every forward pass is a collective call."""
        return self.config.zero_stage == 3

    @property
    def mapped(self) -> bool:
        """Whether the model is memory-mapped from its files and becomes float32 while it is sharded, layer by layer."""
        return self.lockstep and not self.config.lora

    @property
    def chunks(self) -> Chunks:
        """Chunks of the output head's work. In lockstep each call of the head is a collective call, so all ranks use
        the same number of chunks, independent of their micro-batches."""
        return Chunks(most_tokens=self.config.micro_batch_tokens if self.lockstep else None)

    def frozen_base(self) -> AbstractContextManager[None]:
        """Inside, the model is the one that training started from, without gradients.

        Raises:
            ValueError: the model is trained without adapters, so its initial weights are not kept.
        """
        if self.adapters is None:
            raise ValueError("without adapters the initial weights are not kept; set `lora`, or use a reference model")
        return self.adapters.disabled()

    def save(self, directory: str) -> None:
        """Write this rank's part of the engine and random-number state to `directory`.

        Raises:
            CheckpointError: the disk is full.
        """
        self.begin_save(directory)
        self._saving.wait()

    def begin_save(self, directory: str) -> None:
        """Start a `save` from a copy made now; training may continue while it is written. One at a time."""
        self._saving.begin(Path(directory), self.copies())

    def save_progress(self) -> SaveProgress:
        """Progress of the last `begin_save`; errors as in `save`."""
        return self._saving.progress()

    def copies(self) -> dict[str, Callable[[Path], object]]:
        """Writers by file name, holding copies of everything that a checkpoint keeps of this rank."""
        rng = rng_state()
        writers: dict[str, Callable[[Path], object]] = {
            f"rank_{self.rank}.safetensors": self.engine.snapshot().write,
            f"rng_{self.rank}.pt": lambda path: torch.save(rng, path),
        }
        if self.adapters is not None and self.rank == 0:
            writers[ADAPTERS_FILE] = partial(save_adapter_description, self.adapters)
        return writers

    def load(self, directory: str) -> None:
        """Restore what `save` wrote. The caller has verified the files.

        Raises:
            CheckpointError: there is no state, or its adapters have another base model or shape.
        """
        path, self.last_update = Path(directory), None
        check_adapter_description(self.adapters, path)
        self.engine.load(path)
        if (own := path / f"rng_{self.rank}.pt").is_file():  # otherwise there were fewer ranks
            set_rng_state(load_tensors(own))
        self.load_more(path)

    def load_more(self, path: Path) -> None:
        """Restore what a subclass added to `copies`."""

    def plan_weights(self, bucket_bytes: int, fused_groups: list[list[str]]) -> WeightsPlan:
        """Plan publications in buckets of at most `bucket_bytes`, in the model's own precision.

        Args:
            fused_groups: names of tensors that a generator can only replace together.
        """
        specs = [(name, shape, self.published_dtype) for name, shape in self._shapes()]
        changing = expand_fused_groups(self._changing(), fused_groups)
        self._publisher = Publisher(specs, changing, bucket_bytes, self._gather)
        return self._publisher.plan

    def _planned(self) -> Publisher:
        if self._publisher is None:
            raise NoWeightsPlan("this learner has no plan for publishing its weights; call plan_weights first")
        return self._publisher

    def weight_bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:
        """One bucket of the current weights, on rank 0; the others take part in gathering it. Collective under ZeRO-3.

        Args:
            whole: the publication contains all tensors.

        Raises:
            NoWeightsPlan: (here and below) `plan_weights` was not called.
        """
        return self._planned().bucket(version, index, whole)

    def offload_state(self) -> None:
        """Free GPU memory for other roles between updates. See `TrainEngine.offload_state`."""
        self.engine.offload_state()

    def reload_state(self) -> None:
        """Move the state back to the GPU before an update."""
        self.engine.reload_state()

    def connect_weights(self, route: WeightRoute) -> None:
        """Prepare to send weights from GPU to GPU; waits for the generators of a broadcast."""
        from rlhf_ray.weights.direct_sender import open_sender

        self._disconnect_weights()
        self._sender = open_sender(route, self.rank, self.engine.device)

    def _disconnect_weights(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def offer_bucket(self, version: int, index: int, whole: bool = True) -> WeightOffer | None:
        """As `weight_bucket`, but the bytes stay on the GPU until generators read them or `send_bucket` sends them.
        A collective call under ZeRO-3, and if every rank supplies handles."""
        if self._sender is None and not self.lockstep:
            return None
        offer, tensors = self._planned().offer(version, index, whole, self._gather_in_place)
        handles = self._sender.offer(tensors) if self._sender else []
        return None if self.rank else replace(offer, handles=handles)

    def send_bucket(self) -> None:
        """Broadcast the offered bucket."""
        if self._sender is not None:
            self._sender.send()

    def release_weights(self) -> None:
        """Free the offered buckets at the end of a publication."""
        if self._sender is not None:
            self._sender.release()

    def _gather_in_place(self, names: list[str]) -> dict[str, Tensor]:
        tensors = self.engine.gather(self.adapters.sources(names) if self.adapters else names, in_place=True)
        return self.adapters.merged(names, tensors) if self.adapters else tensors

    def unchanged_weights(self) -> dict[str, str] | None:
        """Digests of the tensors that training does not change, on rank 0; errors as in `Publisher.unchanged`."""
        return None if self.rank else self._planned().unchanged()

    def _changing(self) -> list[str]:
        """Names, as in `_shapes`, of the parameters that training changes."""
        trained = {name for name, p in self.engine.module.model.named_parameters() if p.requires_grad}
        sources = self.adapters.sources if self.adapters else list
        return [name for name, _ in self._shapes() if trained.intersection(sources([name]))]

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every parameter of the published model, without adapters."""
        shapes = self.engine.parameter_shapes()
        return self.adapters.base_shapes(shapes) if self.adapters else shapes

    def _gather(self, names: list[str], gather: Gather | None = None) -> dict[str, Tensor] | None:
        """Parameters under their names in `_shapes`, with adapters merged in; None on ranks that do not send.

        Args:
            gather: as for `export`.
        """
        if gather is None and self.rank and not self.lockstep:
            return None
        tensors = (gather or self.engine.gather)(self.adapters.sources(names) if self.adapters else names)
        if self.rank:
            return None
        return self.adapters.merged(names, tensors) if self.adapters else tensors

    def export(
        self, directory: str, card: ModelCardInfo, term: Term | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Write the model in Hugging Face format and its own precision (rank 0; all ranks take part in gathering it).

        Args:
            term: ownership of the run's directory, if `directory` is in one.
            gather: returns whole parameters of the module by name, instead of the current ones; called on every rank.
        """
        names = [name for name, _ in self._shapes()]
        state = {}
        for name in names:
            gathered = self._gather([name], gather) or {}
            state.update({name: t.to(getattr(torch, self.published_dtype)) for name, t in gathered.items()})
        if self.rank:
            return
        inner = self.engine.module.model
        with torch.device("meta"):
            skeleton = type(inner)(inner.config)
        if hasattr(inner, "generation_config"):
            skeleton.generation_config = inner.generation_config
        export_model(skeleton, state, load_tokenizer(self.model_config), Path(directory), card, term=term)

    def export_adapter(self, directory: str, card: ModelCardInfo, term: Term | None = None) -> None:
        """Write only the adapters, in peft's format (rank 0; all ranks take part in gathering them).

        Raises:
            ValueError: the model is trained without adapters.
        """
        if self.adapters is None:
            raise ValueError("there are no adapters to export; set `lora`, or use `export`")
        if self.rank and not self.lockstep:
            return
        trained = self.engine.gather(self.adapters.trained_names(self.engine.parameter_shapes()))
        if self.rank == 0:
            export_adapter(self.adapters.peft_config, self.adapters.peft_state(trained), Path(directory), card,
                           term)

    def begin_profile(self) -> None:
        """Start profiling."""
        self._profile.begin()

    def end_profile(self, trace: str) -> WorkerProfile | None:
        """Write the profile to the file `trace` and return its summary; None if none was recorded."""
        return self._profile.end(Path(trace))

    def leave(self) -> None:
        """Disconnect from the generators and leave the process group."""
        self._disconnect_weights()
        distributed.leave()
