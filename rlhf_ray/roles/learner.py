"""The base of all learners: one rank's passes and optimizer steps. Parts save its state and publish its weights."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.batching import RowNumbers, inference_plan, rank_plan
from rlhf_ray.engine import distributed
from rlhf_ray.engine.deepspeed_engine import TrainEngine
from rlhf_ray.engine.saved_weights import SavedWeights
from rlhf_ray.models.lora import Adapters, check_adapter_description
from rlhf_ray.models.packed_model import Chunks
from rlhf_ray.models.parity import ParityProbe, RowLimits
from rlhf_ray.models.router_balance import RouterBalance
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import (
    Rollout,
    TokenScores,
    UpdateStats,
    WeightBucket,
    WeightOffer,
    WeightRoute,
    WeightsPlan,
)
from rlhf_ray.roles.learner_state import LearnerState, SaveProgress, Writers
from rlhf_ray.roles.micro_batch import (
    AverageMeter,
    MicroBatch,
    PartLoss,
    concatenated,
    score_columns,
    share_of,
)
from rlhf_ray.roles.profiling import ProfiledByTorch
from rlhf_ray.weights.gathered_tensors import GatheredModel, GatheredTensors
from rlhf_ray.weights.publication import Publication

if TYPE_CHECKING:
    from torch import nn


class Learner(ProfiledByTorch):
    """One rank of a trained model. Subclasses define which module is built, what its loss is, and how it is updated.

    Its parts: `state` in checkpoints, the `whole_model` as it is exported, and the `publication` that sends it to the
    generators.

    Example: one optimizer step of a subclass with a method `loss`::

        meter = AverageMeter()
        for share in self.shares(mini_batch, self.loss, meter):
            self.engine.backward(share)
        result = self.engine.step()
        metrics = meter.means()
    """

    head_dropout: float = 0.0
    """Dropout before a scalar head, which subclasses with one set."""

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
        self.config = config
        self.model_config = model.model_copy(update=own)
        self._published_as = model
        self.rank = rank
        self.world = world
        self.seed = seed
        self.total_steps = total_steps
        self.longest = longest or config.micro_batch_tokens
        self.lockstep = config.is_sharded
        """Whether every forward pass is a collective call."""
        self.mapped = self.lockstep and not config.lora
        """Whether the model is memory-mapped from its files and becomes float32 while it is sharded, layer by layer."""
        self.chunks = Chunks(most_tokens=config.micro_batch_tokens if self.lockstep else None,
                             recomputed=bool(config.gradient_checkpointing))
        """Chunks of the output head's work. In lockstep each call of the head is a collective call, so all ranks use
        the same number of chunks, independent of their micro-batches."""
        self.adapters: Adapters | None = None
        self._router_balance: RouterBalance | None = None
        self.publication = Publication(rank, self.lockstep)
        self.last_update: UpdateStats | None = None
        """The last update since this process started or loaded a checkpoint."""

    def start(self, address: str, timeout_s: float) -> dict[str, Any]:
        """Join the other ranks, build the module, wrap it in DeepSpeed, and compare its passes with transformers' own.

        Args:
            timeout_s: longest wait of any collective call for the other ranks, in seconds.

        Returns:
            Numbers of parameters (`parameters` in total, `trained` of them), the result of `ParityProbe.check`, and
            `compiled`, which of the layers are, in words; empty if none was to be.

        Raises:
            ModelError: the model cannot be loaded, or packed passes do not compute it.
        """
        # The module and its engine.
        distributed.join(address, self.rank, self.world, timeout_s)
        module = self._build_adapted()
        torch.manual_seed(self.seed + self.rank)  # ranks use different dropout
        if self.config.router_aux_loss_coef:
            self._router_balance = RouterBalance(module.model)
        sizes = {"parameters": sum(p.numel() for p in module.parameters()),
                 "trained": sum(p.numel() for p in module.parameters() if p.requires_grad)}
        self.engine = TrainEngine(module, self.config, self.total_steps)

        # Its passes beside transformers' own.
        probe = ParityProbe(
            module, RowLimits.of(module.model.config, self.longest, self.config.micro_batch_tokens), self.engine.device,
            gradients=True, call=self.engine.forward_without_engine,
            largest=distributed.largest_of_ranks if self.lockstep else None)
        compared = probe.check(f"{type(self).__name__} of {getattr(self.model_config, 'path', 'a new model')!r}")
        self.engine.release_gathered()

        # What saves, exports and publishes it.
        self.state = LearnerState(self.engine, self.adapters, self.rank)
        self.whole_model = GatheredModel(self.engine, self.adapters, self._published_as, self.rank, self.lockstep)
        return {**sizes, **compared, "compiled": self.engine.compiled.note if self.engine.compiled else ""}

    def open_saved(self, directory: Path) -> SavedWeights:
        """Instead of `start`: only what exports need, with the weights of a checkpoint, in this process alone and
        without DeepSpeed.

        Args:
            directory: this learner's part of the checkpoint; the caller has verified the files.

        Raises:
            ModelError: the model that training started from cannot be loaded.
            CheckpointError: the checkpoint is of another model, or of other adapters.
        """
        module = self._build_adapted()
        check_adapter_description(self.adapters, directory)
        saved = SavedWeights(module, directory)
        self.whole_model = GatheredModel(saved, self.adapters, self._published_as, self.rank, lockstep=False)
        return saved

    def _build_adapted(self) -> "nn.Module":
        """The module, with adapters if configured; new weights follow from the seed."""
        torch.manual_seed(self.seed)
        module = self.build()
        if self.config.lora:
            base = str(getattr(self.model_config, "path", ""))
            self.adapters = Adapters(module.model, self.config.lora, base, self.config.autocast == "bfloat16")
        return module

    def published_tensors(self) -> GatheredTensors:
        """What publications send to the generators: the model."""
        return self.whole_model

    def build(self) -> "nn.Module":
        """The packed module to train."""
        raise NotImplementedError

    def count(self, rows: Any) -> float:
        """Number of tokens, samples, pairs or steps that the loss of some rows is a mean over."""
        raise NotImplementedError

    def shares(
        self, mini_batch: Any, loss: Callable[[Any], PartLoss], meter: AverageMeter,
        passed: RowNumbers | None = None, counted: RowNumbers | None = None,
    ) -> Iterator[Tensor]:
        """This rank's parts of the loss of a mini-batch that every rank holds whole, one for each micro-batch.

        The sum over all ranks and micro-batches is the loss. It does not depend on the number of ranks or on
        `micro_batch_tokens`. The parts are computed one at a time: pass each to `TrainEngine.backward`, which frees its
        graph, before the next is built.

        Args:
            loss: the loss of some rows of the mini-batch.
            meter: receives the statistics of every pass.
            passed: rows that are computed; None for all.
            counted: rows that the loss is a mean over, at least those that are passed; None for all. The loss of those
                that are not passed is taken as 0.
        """
        whole_count = self.count(mini_batch if counted is None else mini_batch.select(counted))
        whole_tokens = float(mini_batch.lengths[slice(None) if passed is None else passed].sum())
        for part, counts in self.parts(mini_batch, passed):
            # The forward pass. A part that does not count adds nothing: all its weights are 0.
            found = loss(part)
            count = self.count(part) if counts else 0.0
            share = found.loss * (count / whole_count if counts else 0.0)
            meter.add(count, found.means)
            meter.add(found.tokens if counts else 0.0, found.token_means)

            # The auxiliary loss of the routers in this pass, by the part's share of the mini-batch's tokens.
            if self._router_balance is not None:
                balance = self._router_balance.loss()
                tokens = float(part.lengths.sum()) if counts else 0.0
                share = share + self.config.router_aux_loss_coef * balance * (tokens / whole_tokens if counts else 0.0)
                meter.add(tokens, {"router_aux_loss": balance.detach()})
            yield share

    def parts(self, rows: Any, passed: RowNumbers | None = None) -> Iterator[tuple[Any, bool]]:
        """This rank's micro-batches of some rows (`passed`; None for all), and whether each counts. A rank without rows
        left takes part in the collective calls with any row, which does not. So does every rank if there are none."""
        among = np.arange(len(rows)) if passed is None else passed
        plan = rank_plan(rows.lengths[among], self.world, self.config.micro_batch_tokens)[self.rank]
        if not plan and len(rows):
            plan = [among[:0]]
        for chosen in plan:
            yield rows.select(among[chosen] if len(chosen) else [0]), len(chosen) > 0

    def score(
        self, rollouts: Sequence[Rollout], forward: Callable[[MicroBatch], Sequence[Tensor]], columns: int = 1
    ) -> list[TokenScores]:
        """Columns of scores of this rank's contiguous share (`inference_plan`) of all rows; `forward` as for
        `score_columns`."""
        rollout = concatenated(rollouts)
        plan = inference_plan(rollout.lengths, self.config.micro_batch_tokens, self.rank, self.world, self.lockstep)
        scores = score_columns(rollout, plan, self.engine.device, forward, columns)
        return [share_of(column, self.rank, self.world) for column in scores]

    def begin_save(self, directory: str) -> None:
        """See `LearnerState.begin_save`."""
        self.state.begin_save(Path(directory), self.copies())

    def copies(self) -> Writers:
        """Writers of what a subclass has besides engine and random numbers."""
        return {}

    def load(self, directory: str) -> None:
        """See `LearnerState.load`; a subclass also restores the files of `copies`."""
        self.last_update = None
        self.state.load(Path(directory))

    def save_progress(self) -> SaveProgress:
        """See `LearnerState.save_progress`."""
        return self.state.save_progress()

    def offload_state(self) -> None:
        """See `TrainEngine.offload_state`."""
        self.engine.offload_state()

    def reload_state(self) -> None:
        """See `TrainEngine.reload_state`."""
        self.engine.reload_state()

    def plan_weights(self, bucket_bytes: int, fused_groups: list[list[str]]) -> WeightsPlan:
        """See `Publication.plan`."""
        return self.publication.plan(self.published_tensors(), bucket_bytes, fused_groups)

    def weight_bucket(self, version: int, index: int, whole: bool = True) -> WeightBucket | None:
        """See `Publication.bucket`."""
        return self.publication.bucket(version, index, whole)

    def broadcast_route(self, host: str, world: int) -> WeightRoute:
        """How a broadcast from this process to `world` - 1 others is joined; `host` is this node's address."""
        from rlhf_ray.weights.direct_sender import broadcast_route

        return broadcast_route(self.engine.device, host, world)

    def connect_weights(self, route: WeightRoute) -> None:
        """See `Publication.connect`."""
        self.publication.connect(route)

    def offer_bucket(self, version: int, index: int, whole: bool = True) -> WeightOffer | None:
        """See `Publication.offer`."""
        return self.publication.offer(version, index, whole)

    def send_bucket(self) -> None:
        """See `Publication.send`."""
        self.publication.send()

    def release_weights(self) -> None:
        """See `Publication.release`."""
        self.publication.release()

    def unchanged_weights(self) -> dict[str, str] | None:
        """See `Publication.unchanged`."""
        return self.publication.unchanged()

    def export(self, directory: str, card: ModelCardInfo, term: Term | None = None) -> None:
        """See `GatheredModel.export`."""
        self.whole_model.export(directory, card, term)

    def export_adapter(self, directory: str, card: ModelCardInfo, term: Term | None = None) -> None:
        """See `GatheredModel.export_adapter`."""
        self.whole_model.export_adapter(directory, card, term)

    def leave(self) -> None:
        """Disconnect from the generators and leave the process group."""
        self.publication.disconnect()
        distributed.leave()
