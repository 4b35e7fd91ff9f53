"""A model under training: forward and backward over any number of micro-batches, one optimizer step at the end.

DeepSpeed runs with unmanaged gradient accumulation: `backward` accumulates, `step` is the boundary. Losses must already
be divided by the *global* count they are means over (tokens or rows of the whole mini-batch on all ranks), so the
update does not depend on how the mini-batch is cut or distributed.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_ray.config.learner import (
    SHARDED_BUCKET,
    LearnerConfig,
    OptimizerConfig,
    PPOLearnerConfig,
    recomputed_layers,
)
from rlhf_ray.engine.optimizer_shards import MOMENTS, OptimizerShard, optimizer_shards
from rlhf_ray.engine.parameter_shards import shard_parameters
from rlhf_ray.engine.training_state import WEIGHTS, Snapshot, TrainingState, snapshot
from rlhf_ray.errors import CheckpointError, ModelError, TrainingError
from rlhf_ray.internals.deepspeed import (
    autocast,
    drop_gradients,
    full_shape,
    gather_together,
    leave_gradients_unreduced,
    managed_shard,
    mark_no_experts,
    offload_optimizer,
    release_gathered,
    reload_optimizer,
    wrapped_optimizer,
)
from rlhf_ray.internals.transformers import decoder_layers, keep_activations, layers_of
from rlhf_ray.models.compiled import CompiledLayers, compile_layers
from rlhf_ray.models.config_json import context_of
from rlhf_ray.models.packed_model import hidden_states
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity_pass import embedding_as_leaf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_TRIED = 5
"""Rows, at least, of the pass by which layers are compiled. Sizes that are equal by chance would be one symbol; so its
longest row is odd, and neither its number of rows nor the next number is a multiple of 4, as sizes of heads are."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    applied: bool
    """False if a loss or gradient was not finite on some rank; weights and optimizer are then unchanged everywhere."""
    grad_norm: float
    """Global gradient norm before clipping; not finite if the step was not applied."""
    learning_rate: float


class TrainEngine:
    """DeepSpeed around one module. Every method is a collective call: all ranks make it together.

    Example: an optimizer step on two micro-batches, whose losses are sums over all ranks' tokens::

        for rows in (first, second):
            loss = loss_of(engine.forward(rows.tokens, rows.packing)) / tokens_of_all_ranks
            engine.backward(loss)
        result = engine.step()  # or `engine.drop_gradients()`
    """

    def __init__(self, module: nn.Module, config: LearnerConfig, total_steps: int) -> None:
        import deepspeed

        self.config = config
        self.total_steps = total_steps
        self.optimizer_steps = 0
        """Position in the learning rate's schedule: optimizer steps applied or skipped by `pass_over` so far."""
        self.consecutive_skipped_updates = 0
        """Consecutive updates that applied no step; see `count_update`."""
        self.world = dist.get_world_size()
        if config.gradient_checkpointing:
            recompute_layers(module.model, config.gradient_checkpointing)
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._training: bool | None = None
        stage = self._stage = _useful_stage(config, self.world)
        largest = max(p.numel() for p in self._trained.values())
        optimizer = adamw(module, config)
        settings = deepspeed_config(config, stage, largest)
        if stage == 3:
            mark_no_experts()
            shard_parameters(module, settings)
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings,
                                               dist_init_required=False)
        if stage == 3:
            gather_together(self.engine, layers_of(module))
        self._norm: float | None = None
        if stage == 0:
            self.engine.optimizer.register_step_pre_hook(self._clip)
            if self.world == 1:
                leave_gradients_unreduced(self.engine)
        self.device = self.engine.device
        self.compiled: CompiledLayers | None = None
        """What is compiled of the layers; None if nothing was to be."""
        if config.compiles_layers:
            self.compiled = compile_layers(module.model, self._try_all, required=config.compile_layers is True)

    @property
    def module(self) -> nn.Module:
        """The wrapped module (under ZeRO-3 its parameters are shards)."""
        return self.engine.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with autocast if configured."""
        self._set_mode(True)
        with self._cast_cache():
            return self.engine(*args, **kwargs)

    @torch.no_grad()
    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass without gradients."""
        self._set_mode(False)
        with self._cast_cache():
            return self.engine(*args, **kwargs)

    @torch.no_grad()
    def infer_rounded(self, precision: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        """As `infer`, computed in `precision`, of which the embedding's output has one rounding more. How far the
        results are from those of `infer` shows what rounding does to them."""
        self._set_mode(False)
        with embedding_as_leaf(self.module.model, torch.finfo(precision).eps / 2), torch.autocast(
                torch.device(self.device).type, torch.bfloat16, precision is torch.bfloat16, self._stage < 3):
            return self.module(*args, **kwargs)

    def forward_without_engine(self, *args: Any, **kwargs: Any) -> Any:
        """The same forward pass as `forward`, outside DeepSpeed: its graph accumulates no gradients in the engine, and
        layers keep their train or eval mode."""
        with self._cast_cache(), autocast(self.engine):
            return self.module(*args, **kwargs)

    def _try_all(self, fewer: bool) -> None:
        for gradients in (True, False):
            self.try_layers(gradients, fewer)

    def try_layers(self, gradients: bool, fewer: bool = False) -> None:
        """A pass of the model's layers over a micro-batch of random tokens, as in updates or, without gradients, as in
        scoring. Compiled layers choose kernels by the sizes of their first pass of each kind; so these must be the same
        when a run is resumed. The state of the run is not touched.

        Args:
            fewer: leave out the longest row, if there are others of different lengths.
        """
        model = self.module.model
        most = self.config.micro_batch_tokens
        longest = max(3, min(context_of(model.config) or most, most // ROWS_TRIED)) - 1 | 1
        rows = min((most // longest - 1) // 4 * 4 + 1, longest)
        lengths = np.arange(longest, longest - rows, -1)
        packing = Packing.of(lengths[1:] if fewer and rows > 2 else lengths, self.device)
        trained = [p for layer in decoder_layers(model) for p in layer.parameters() if p.requires_grad]
        self._set_mode(gradients)
        with torch.random.fork_rng([self.device] if self._on_gpu else []), self._cast_cache(), autocast(self.engine):
            tokens = torch.randint(model.config.get_text_config().vocab_size, (packing.tokens,), device=self.device)
            with torch.set_grad_enabled(gradients):
                states = hidden_states(model, tokens, packing)
        if gradients and trained:
            torch.autograd.grad(states.sum(), trained[:1])

    def release_gathered(self) -> None:
        """Under ZeRO-3, free gathered parameters after passes that no `step` follows; `step` frees them itself."""
        if self._stage == 3:
            release_gathered(self.engine)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to that of the next `step`, and free the loss's graph.

        Args:
            loss: this rank's part of a sum over all ranks and micro-batches, already divided by the global count. All
                ranks run the same number of backward passes before a step.
        """
        # DeepSpeed averages gradients over ranks; the losses are parts of a sum.
        self.engine.backward(loss * _finite_or_nan(loss, self.world), scale_wrt_gas=False)

    def drop_gradients(self) -> None:
        """Leave out the step of the backward passes since the last one: it has no effect on later ones."""
        drop_gradients(self.engine, self._stage)

    def step(self) -> StepResult:
        """One optimizer step by the gradients of all backward passes since the last one.

        A loss or gradient that is not finite on any rank makes the gradient norm non-finite, which is the same number
        on all ranks at every ZeRO stage. So all ranks skip the step together, and it has no effect on later ones.
        """
        rate = learning_rate(self.config.optimizer, self.optimizer_steps, self.total_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() if self._norm is None else self._norm)
        applied = self.engine.was_step_applied() and math.isfinite(norm)
        self.optimizer_steps += applied
        return StepResult(applied, norm, rate)

    def pass_over(self, steps: int) -> None:
        """Advance the learning rate's schedule past optimizer steps that are not made."""
        self.optimizer_steps += steps

    def count_update(self, applied: int) -> None:
        """Note the end of an update, in which `applied` steps were applied.

        Raises:
            TrainingError: no step was applied in `optimizer.max_consecutive_skipped_updates` consecutive updates.
        """
        self.consecutive_skipped_updates = 0 if applied else self.consecutive_skipped_updates + 1
        if self.consecutive_skipped_updates >= self.config.optimizer.max_consecutive_skipped_updates:
            raise TrainingError(f"no loss and gradient was finite in {self.consecutive_skipped_updates} consecutive "
                                "updates (optimizer.max_consecutive_skipped_updates); the weights are unchanged. Lower "
                                "the learning rate, check the rewards of these steps, and resume from the last "
                                "checkpoint.")

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip the gradients, which are already summed over ranks, and keep their norm. At stage 0 DeepSpeed neither
        keeps the norm nor checks that it is finite. If it is not, the gradients are dropped and the optimizer does
        nothing."""
        gradients = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self.config.optimizer.grad_clip or math.inf
        self._norm = float(torch.nn.utils.clip_grad_norm_(gradients, limit))
        if not math.isfinite(self._norm):
            self.engine.zero_grad()

    def snapshot(self) -> Snapshot:
        """A copy of this rank's part of weights, optimizer state and counters. `Snapshot.write` writes it to a file of
        the directory that `load` reads. Frozen parameters are left out: they are as the module was built."""
        shards = optimizer_shards(self.engine, self._stage, self._trained)
        return snapshot(shards, self._optimizer.state, {
            "world": self.world, "optimizer_steps": self.optimizer_steps,
            "consecutive_skipped_updates": self.consecutive_skipped_updates})

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Restore the state that all ranks wrote; the number of ranks and the ZeRO stage may have changed.

        Raises:
            CheckpointError: `directory` holds no learner state, or that of another model.
        """
        saved = TrainingState(directory)
        if saved.names() != self._trained.keys():
            raise CheckpointError(f"{directory} holds the state of other parameters than this run trains: "
                                  f"{sorted(saved.names() ^ self._trained.keys())[:3]} are in only one of the two. "
                                  "Resume with the model and adapters it was saved with, or start a new run.")
        if self._stage < 3:
            for name, parameter in self._trained.items():
                parameter.copy_(cast(Tensor, saved.whole(WEIGHTS, name, parameter.numel())).view_as(parameter))
        for part in optimizer_shards(self.engine, self._stage, self._trained, whole=True):
            self._restore(saved, part)
        self.optimizer_steps = int(saved.notes["optimizer_steps"])
        self.consecutive_skipped_updates = int(saved.notes["consecutive_skipped_updates"])

    def _restore(self, saved: TrainingState, part: OptimizerShard) -> None:
        span, states = slice(part.start, part.stop), self._optimizer.state
        # Between phases the state is in main memory; generators may be awake on this GPU.
        offloads = isinstance(self.config, PPOLearnerConfig) and self.config.offload_between_phases
        device = "cpu" if offloads else part.owner.device
        weights = cast(Tensor, saved.whole(WEIGHTS, part.name, part.numel))[span]
        part.weights.copy_(weights)
        if self._stage == 3:
            managed_shard(self._trained[part.name])[: len(weights)].copy_(weights)
        for moment in MOMENTS:
            whole = saved.whole(moment, part.name, part.numel)
            if whole is None:  # saved before the first optimizer step
                states.pop(part.owner, None)
                return
            state = states[part.owner]
            if moment not in state:
                state[moment] = torch.zeros_like(part.owner, device=device)
            part.view_of(state[moment]).copy_(whole[span])
            step = saved.notes["steps"][part.name]
            state["step"] = step if self.config.offload_optimizer else torch.tensor(
                float(step), device=part.owner.device)  # the type that each of the two optimizers uses

    def offload_state(self) -> None:
        """Move the optimizer state to CPU memory and free the GPU memory it occupied."""
        offload_optimizer(self._optimizer, pin=self._on_gpu)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def reload_state(self) -> None:
        """Move the optimizer state back to the device; required before the next `step`."""
        reload_optimizer(self._optimizer, self.device)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return wrapped_optimizer(self.engine, self._stage)

    @property
    def _on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and full shape of every parameter of the inner model, in a fixed order; tied parameters appear once."""
        return [(name, tuple(full_shape(p))) for name, p in self._parameters.items()]

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Those of the inner model; looking for them takes longer than casting a bucket of them on a GPU."""
        return dict(self.module.model.named_parameters())

    @torch.no_grad()
    def gather(self, names: list[str], wanted: bool = True) -> dict[str, Tensor]:
        """Whole parameters by name, on their device. Under ZeRO-3 they are copies, gathered from all ranks.

        Args:
            wanted: whether this rank needs them; a rank that does not takes part in gathering them, and copies none.
        """
        chosen = [self._parameters[name] for name in names]
        if self.config.zero_stage < 3:
            return {name: p.detach() for name, p in zip(names, chosen, strict=True)} if wanted else {}
        import deepspeed

        with deepspeed.zero.GatheredParameters(chosen):
            return {name: p.detach().clone() for name, p in zip(names, chosen, strict=True)} if wanted else {}

    def _set_mode(self, mode: bool) -> None:
        """Put all layers in train or eval mode, if they are not; walking over all layers takes time."""
        if self._training is not mode:  # not `engine.training`, which may differ from its layers' mode
            self.engine.train(mode)
            self._training = mode

    def _cast_cache(self) -> torch.autocast:
        # Autocast caches cast weights until the pass ends: under ZeRO-3 that is the whole model on every rank.
        # DeepSpeed turns autocast itself on (see _torch_autocast) and leaves this setting as it is.
        return torch.autocast(torch.device(self.device).type, enabled=False, cache_enabled=self._stage < 3)


def _finite_or_nan(loss: Tensor, weight: float) -> Tensor:
    """A factor for the loss: `weight`, or NaN if the loss is not finite, because its gradient may still be finite."""
    return torch.where(torch.isfinite(loss.detach()), weight, torch.nan)


def recompute_layers(model: "PreTrainedModel", share: float) -> None:
    """Recompute the activations of a share of the layers, spread evenly, in backward passes.

    Raises:
        ModelError: the model only recomputes all layers together.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if share == 1:
        return
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(f"gradient_checkpointing={share:g} is a share of the layers, but {type(model).__name__} "
                         "recomputes all of them or none; set it to true or false")
    number = recomputed_layers(share, len(layers))
    for i, layer in enumerate(layers):
        if (i + 1) * number // len(layers) == i * number // len(layers):
            keep_activations(layer)


def adamw(module: nn.Module, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only. On CPUs the fused kernel is several times as fast as the default."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.optimizer.weight_decay},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = config.optimizer
    if config.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=optimizer.learning_rate,
                             betas=optimizer.betas, eps=optimizer.eps, fused=True)


def _useful_stage(config: LearnerConfig, world: int) -> int:
    """The ZeRO stage to run. A single rank has no other rank to share optimizer state and gradients with; copying them
    into DeepSpeed's buffers and back would waste a tenth of a small model's update."""
    alone = world == 1 and config.zero_stage < 3 and not config.offload_optimizer
    return 0 if alone else config.zero_stage


def deepspeed_config(config: LearnerConfig, stage: int, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration at a ZeRO stage, for a model whose largest trained parameter has `largest` elements."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 2 and not config.offload_optimizer:
        # Gradients are reduced in every micro-batch, while its backward pass goes on. A bucket holds the largest
        # parameter, because others are reduced in place, in memory that the backward pass may overwrite meanwhile.
        zero |= {"overlap_comm": True, "reduce_bucket_size": max(SHARDED_BUCKET, largest)}
    if stage == 3:
        # Norms are gathered in one call with their layer, so keeping them whole on every rank would save little, and
        # DeepSpeed's default of 100,000 elements would keep adapters and small models whole, too.
        zero |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": SHARDED_BUCKET}
    if config.offload_optimizer and stage:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.grad_clip if stage else 0.0,  # see TrainEngine._clip
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "torch_autocast": _torch_autocast(config),
    }


def _torch_autocast(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's autocast setting. It must be set here: on CUDA the engine turns off an autocast around it
    (deepspeed/runtime/torch_autocast.py).

    The list of modules that are safe in lower precision stays empty. It does not decide what is computed in bfloat16:
    it names parameters that ZeRO gathers, and whose gradients it reduces, in bfloat16. The sum over ranks would be
    rounded at every addition (stage_1_and_2.py, stage3.py: `communication_data_type`). A tied head would include the
    embedding, whose rows would be rounded on several ranks and exact on one. And gathered parameters are float32
    again, so no memory is saved (partition_parameters.py: `AllGatherCoalescedHandle.wait`), only communication.
    """
    return {"enabled": config.autocast == "bfloat16", "dtype": "bfloat16", "lower_precision_safe_modules": []}


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`.

    Warm-up rises from peak/warmup to the peak. Decay ends at `min_ratio` x peak on the last step.
    """
    warmup = config.warmup_of(total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.decay == "constant":
        return config.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    share = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_ratio + (1 - config.min_ratio) * share)
