"""A model under training: forward and backward over any number of micro-batches, one optimizer step at the end.

DeepSpeed runs with unmanaged gradient accumulation: `backward` adds up, `step` is the boundary. Losses must arrive
already divided by the *global* count they are means over (tokens or rows of the whole mini-batch on all ranks), so the
update does not depend on how the mini-batch was cut or shared out.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_ray.config.learner import SHARDED_BUCKET, LearnerConfig, OptimizerConfig
from rlhf_ray.engine.optimizer_shards import MOMENTS, OptimizerShard, adamw, optimizer_shards
from rlhf_ray.engine.parameter_shards import shard_parameters
from rlhf_ray.engine.training_state import WEIGHTS, Snapshot, TrainingState, snapshot
from rlhf_ray.errors import CheckpointError, TrainingError


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    applied: bool
    """False where a loss or gradient was not finite on some rank: on all ranks, weights and optimizer are as before."""
    grad_norm: float
    """Global gradient norm before clipping; not finite where the step was not applied."""
    learning_rate: float


class TrainEngine:
    """DeepSpeed around one module. Every method but `device` is a collective call: all ranks make it together."""

    def __init__(self, module: nn.Module, config: LearnerConfig, total_steps: int) -> None:
        import deepspeed

        self.config = config
        self.total_steps = total_steps
        self.optimizer_steps = 0
        """Applied so far."""
        self.consecutive_skipped_updates = 0
        """Updates in a row that applied no step; see `count_update`."""
        self.world = dist.get_world_size()
        if config.gradient_checkpointing:
            module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._training: bool | None = None
        stage = self._stage = _useful_stage(config, self.world)
        optimizer, settings = _adamw(module, config), _deepspeed_config(config, stage)
        if stage == 3:
            shard_parameters(module, settings)
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings,
                                               dist_init_required=False)
        self._norm: float | None = None
        if stage == 0:
            self.engine.optimizer.register_step_pre_hook(self._clip)
            self.engine.enable_backward_allreduce = self.world > 1  # else it goes through buffers to nobody
        self.device = self.engine.device

    @property
    def module(self) -> nn.Module:
        """The wrapped module (under ZeRO-3 its parameters are shards)."""
        return self.engine.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with autocast if configured."""
        self._train(True)
        with self._cast_cache():
            return self.engine(*args, **kwargs)

    @torch.no_grad()
    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without gradients."""
        self._train(False)
        with self._cast_cache():
            return self.engine(*args, **kwargs)

    def apart(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward as `forward` runs it, with a graph that DeepSpeed does not know: nothing is added up
        from it, and layers stay in the mode that they are in."""
        from deepspeed.runtime.torch_autocast import autocast_if_enabled

        with self._cast_cache(), autocast_if_enabled(self.engine):
            return self.module(*args, **kwargs)

    def release(self) -> None:
        """Under ZeRO-3: hold nothing but shards again after passes that no step follows, which would see to that."""
        if self._stage == 3:
            self.engine.optimizer.parameter_offload.partition_all_parameters()

    def step(self, losses: Iterable[Tensor]) -> StepResult:
        """Run backward on each loss as it is made, then one optimizer step.

        A loss or gradient that is not finite on any rank reaches the gradient's norm, which is one number for all ranks
        at every ZeRO stage: they leave the step out together, and the next one is as if it had not been tried.

        Args:
            losses: this rank's losses, each already divided by the global count; made lazily, so that one
                micro-batch's graph is freed before the next is built. All ranks give the same number.
        """
        for loss in losses:
            # DeepSpeed averages gradients over ranks; the losses are parts of a sum.
            self.engine.backward(loss * _seen_in_gradient(loss, self.world), scale_wrt_gas=False)
        rate = learning_rate(self.config.optimizer, self.optimizer_steps, self.total_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() if self._norm is None else self._norm)
        applied = self.engine.was_step_applied() and math.isfinite(norm)
        self.optimizer_steps += applied
        return StepResult(applied, norm, rate)

    def count_update(self, applied: int) -> None:
        """An update is over, `applied` of whose steps were applied.

        Raises:
            TrainingError: none of them, in as many updates in a row as `optimizer.max_consecutive_skipped_updates`.
        """
        self.consecutive_skipped_updates = 0 if applied else self.consecutive_skipped_updates + 1
        if self.consecutive_skipped_updates >= self.config.optimizer.max_consecutive_skipped_updates:
            raise TrainingError(f"no loss and gradient was finite in {self.consecutive_skipped_updates} updates in a "
                                "row (optimizer.max_consecutive_skipped_updates); the weights are unchanged. Lower the "
                                "learning rate, look at the rewards of these steps, and resume from the last "
                                "checkpoint.")

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip the gradients, summed over ranks by now, and keep their norm. DeepSpeed neither keeps it at stage 0 nor
        looks whether it is finite; without gradients the optimizer does nothing."""
        gradients = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self.config.optimizer.grad_clip or math.inf
        self._norm = float(torch.nn.utils.clip_grad_norm_(gradients, limit))
        if not math.isfinite(self._norm):
            self.engine.zero_grad()

    def snapshot(self) -> Snapshot:
        """A copy of this rank's part of weights, optimizer and progress, which `Snapshot.write` puts into a file of the
        directory that `load` reads. Frozen parameters are left out: they are as the module was built."""
        shards = optimizer_shards(self.engine, self._stage, self._trained)
        return snapshot(shards, adamw(self.engine, self._stage).state, {
            "world": self.world, "optimizer_steps": self.optimizer_steps,
            "consecutive_skipped_updates": self.consecutive_skipped_updates})

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Take back what all ranks wrote, however many there were and at whichever ZeRO stage.

        Raises:
            CheckpointError: there is no learner's state in `directory`, or it is of another model.
        """
        saved = TrainingState(directory)
        if saved.names() != self._trained.keys():
            raise CheckpointError(f"{directory} holds the state of other parameters than this run trains: "
                                  f"{sorted(saved.names() ^ self._trained.keys())[:3]} are in one of the two only")
        if self._stage < 3:
            for name, parameter in self._trained.items():
                parameter.copy_(_there(saved.whole(WEIGHTS, name, parameter.numel())).view_as(parameter))
        for part in optimizer_shards(self.engine, self._stage, self._trained, whole=True):
            self._take_back(saved, part)
        self.optimizer_steps = int(saved.notes["optimizer_steps"])
        self.consecutive_skipped_updates = int(saved.notes["consecutive_skipped_updates"])

    def _take_back(self, saved: TrainingState, part: OptimizerShard) -> None:
        span, states = slice(part.start, part.stop), adamw(self.engine, self._stage).state
        weights = _there(saved.whole(WEIGHTS, part.name, part.numel))[span]
        part.weights.copy_(weights)
        if self._stage == 3:
            self._trained[part.name].ds_tensor.view(-1)[: len(weights)].copy_(weights)
        for moment in MOMENTS:
            whole = saved.whole(moment, part.name, part.numel)
            if whole is None:  # saved before the optimizer's first step
                states.pop(part.owner, None)
                return
            state = states[part.owner]
            if moment not in state:
                state[moment] = torch.zeros_like(part.owner)
            part.of(state[moment]).copy_(whole[span])
            step = saved.notes["steps"][part.name]
            state["step"] = step if self.config.offload_optimizer else torch.tensor(
                float(step), device=part.owner.device)  # as each of the two optimizers keeps it

    def offload_state(self) -> None:
        """Move the optimizer's state to the CPU's memory, and give back what that frees of the GPU's."""
        from deepspeed.runtime.zero.offload_states import offload_optimizer_states

        offload_optimizer_states(adamw(self.engine, self._stage), "cpu", pin_memory=self._on_gpu)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def reload_state(self) -> None:
        """Take the optimizer's state back; without it no `step` may be made."""
        from deepspeed.runtime.zero.offload_states import reload_optimizer_states

        reload_optimizer_states(adamw(self.engine, self._stage), self.device)

    @property
    def _on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and full shape of every parameter of the inner model, tied ones once, in a fixed order."""
        return [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in self.module.model.named_parameters()]

    @torch.no_grad()
    def gather(self, names: list[str], in_place: bool = False) -> dict[str, Tensor]:
        """Whole parameters by name, on the CPU; under ZeRO-3 collected from all ranks for this call only.

        Args:
            in_place: where they are instead, and copied only under ZeRO-3.
        """
        parameters = dict(self.module.model.named_parameters())
        chosen = [parameters[name] for name in names]
        if self.config.zero_stage < 3:
            return {name: p.detach() if in_place else p.detach().cpu() for name, p in zip(names, chosen, strict=True)}
        import deepspeed

        with deepspeed.zero.GatheredParameters(chosen):
            return {name: p.detach().to(p.device if in_place else "cpu", copy=True)
                    for name, p in zip(names, chosen, strict=True)}

    def _train(self, mode: bool) -> None:
        """Tell all layers whether they are being trained; there are many, and mostly they know."""
        if self._training is not mode:  # what the engine says of itself is not what its layers are told
            self.engine.train(mode)
            self._training = mode

    def _cast_cache(self) -> torch.autocast:
        # What autocast casts it keeps to the end of the pass: under ZeRO-3 that would be the whole model on every rank.
        # Autocast itself is DeepSpeed's to turn on (see _torch_autocast), which leaves this as it finds it.
        return torch.autocast(torch.device(self.device).type, enabled=False, cache_enabled=self._stage < 3)


def _seen_in_gradient(loss: Tensor, weight: float) -> Tensor:
    """A factor for the loss: `weight`, or NaN for a loss that is not finite, some of which have finite gradients."""
    return torch.where(torch.isfinite(loss.detach()), weight, torch.nan)


def _there(tensor: Tensor | None) -> Tensor:
    """A tensor of a parameter that is known to have been saved."""
    if tensor is None:
        raise CheckpointError("a parameter was saved without its weights")
    return tensor


def _adamw(module: nn.Module, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only. The fused kernel is several times the plain one's speed on CPUs."""
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
    """The ZeRO stage to run. One rank has nobody to share optimizer state and gradients with, and copies them into
    DeepSpeed's buffers and back for nothing, a tenth of a small model's update."""
    alone = world == 1 and config.zero_stage < 3 and not config.offload_optimizer
    return 0 if alone else config.zero_stage


def _deepspeed_config(config: LearnerConfig, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
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
    """Whether DeepSpeed's engine passes through the module with autocast. It has the last word: an autocast around the
    engine is turned off on CUDA (deepspeed/runtime/torch_autocast.py).

    No module is named as safe in lower precision. That list has nothing to do with what is computed in bfloat16: it is
    of parameters that ZeRO gathers and whose gradients it reduces in bfloat16. The sum over ranks would be rounded at
    every addition (stage_1_and_2.py, stage3.py: `communication_data_type`), a tied head would take the embedding along,
    whose rows would be read rounded by several ranks and exact by one, and what is gathered is float32 again, with no
    memory saved (partition_parameters.py: `AllGatherCoalescedHandle.wait`). Only fewer bytes would travel.
    """
    return {"enabled": config.autocast == "bfloat16", "dtype": "bfloat16", "lower_precision_safe_modules": []}


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`.

    Warm-up rises from peak/warmup to the peak. Decay ends at `min_ratio` x peak on the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    share = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_ratio + (1 - config.min_ratio) * share)
