"""The fastest of the divisions that `rlhf-ray plan` accepts, and where its step's time goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.cluster_model.run_shape import (
    MICRO_BATCHES,
    MODELS,
    Division,
    RunShape,
    configuration,
    divisions,
    smallest_group,
)
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.planning.findings import TIGHT
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.plan import make_plan
from rlhf_ray.planning.roles import Role, roles_of
from rlhf_ray.planning.step_time import StepTime, estimate_step_time, workload_of
from rlhf_ray.planning.worker_placement import Placement, Worker

GPU_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
STALENESS = (0, 1, 2, 4)
CLOSE_ENOUGH = 0.02
"""Slowdown that is accepted for less staleness."""


@dataclass(frozen=True)
class Predicted:
    """A run, predicted; not run on a GPU."""

    run: RunShape
    division: Division
    step: StepTime
    tokens: float
    """Prompt and response tokens of a step."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step by part. With staleness they overlap, so their sum is more than the step."""
        took = self.step.roles
        return {"generation": took["generator"],
                "scoring": max(took["reference"], took.get("reward", 0.0)),
                "update": max(took["policy"], took.get("critic", 0.0)),
                "publication": took["publication"], "transfer": took["coordinator"]}

    @property
    def samples_per_gpu(self) -> float:
        """Samples a second of one GPU."""
        return self.step.samples_per_second / self.run.gpus

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second of one GPU, prompts included."""
        return self.tokens / self.step.seconds / self.run.gpus


@dataclass(frozen=True)
class Refused:
    """A run that no division makes possible, and why `rlhf-ray plan` refuses the one that is nearest."""

    run: RunShape
    reason: str


Sweep = dict[str, list[Predicted | Refused]]
"""Predictions by model, in the order of `GPU_COUNTS`."""


def predict(run: RunShape) -> Predicted | Refused:
    """The fastest division that is accepted, or why there is none."""
    nodes, tried, full = run.nodes, [], None
    for division in divisions(run):
        config, division, roles = largest_that_fits(run, division)
        if max(role.memory(run.hardware).device_bytes for role in roles) > TIGHT * run.hardware.memory_bytes:
            full = config if full is None or division.learners > full.policy.workers else full
        elif (took := estimate_step_time(config, roles, packed(config, nodes), nodes, run.work)) is not None:
            tried.append((took.seconds, division, config))
    for _, division, config in sorted(tried, key=lambda one: one[0]):
        plan = make_plan(resolve(config), nodes, shape_of, work=run.work)
        if not plan.refused and plan.step_time is not None:
            tokens = (run.work or workload_of(config)).row * plan.step_time.samples
            return Predicted(run, division, plan.step_time, tokens)
        full = config
    return Refused(run, why(run, nodes, full))


def why(run: RunShape, nodes: Sequence[Node], config: PPOConfig | None) -> str:
    """Why a run is not possible, as `rlhf-ray plan` says it of the configuration with the most learners."""
    if config is None:
        return f"each role needs GPUs of its own, {smallest_group(run)} for a copy of the weights"
    refused = make_plan(config, nodes, shape_of, work=run.work).refused
    return refused[0].partition(". ")[0] if refused else f"more than {TIGHT:.0%} of a GPU would be in use"


def largest_that_fits(run: RunShape, division: Division) -> tuple[PPOConfig, Division, list[Role]]:
    """The configuration with the largest micro-batch that leaves a tenth of a learner's GPU free, or the smallest."""
    for tokens in MICRO_BATCHES:
        division = replace(division, micro_batch_tokens=tokens)
        config = configuration(run, division)
        roles = roles_of(config, shape_of)
        learners = [role for role in roles if role.name in ("policy", "critic")]
        if all(role.memory(run.hardware).device_bytes <= TIGHT * run.hardware.memory_bytes for role in learners):
            break
    return config, division, roles


def packed(config: PPOConfig, nodes: Sequence[Node]) -> Placement:
    """The roles' workers on whole GPUs, one role after the other. Only for choosing a division: `make_plan` then places
    it as Ray would, which takes longer."""
    free = ((node.name, device) for node in nodes for device in range(node.gpus))
    workers = []
    for name in ("generator", "reference", "reward", "policy", "critic"):
        place = getattr(config, name)
        for rank in range(place.workers if place.gpus else 0):
            devices = [next(free) for _ in range(int(place.gpus))]
            workers.append(Worker(name, rank, place.pool, rank, devices[0][0], tuple(device for _, device in devices)))
    return Placement(tuple(workers), ())


def recommended(run: RunShape) -> Predicted | Refused:
    """The prediction with the least staleness that is within 2% of the fastest."""
    made = [predict(replace(run, staleness=staleness)) for staleness in STALENESS]
    found = [one for one in made if isinstance(one, Predicted)]
    if not found:
        return made[0]
    fastest = min(one.step.seconds for one in found)
    return next(one for one in found if one.step.seconds <= (1 + CLOSE_ENOUGH) * fastest)


def sweep(run: RunShape, counts: Sequence[int] = GPU_COUNTS, samples_per_gpu: int | None = None) -> Sweep:
    """Every model on every number of GPUs.

    Args:
        run: gives the batch.
        samples_per_gpu: let the batch grow with the GPUs instead.
    """
    def at(path: str, gpus: int) -> RunShape:
        prompts = run.prompts if samples_per_gpu is None else samples_per_gpu * gpus // run.samples_per_prompt
        return replace(run, model=path, gpus=gpus, prompts=prompts)

    return {name: [recommended(at(path, gpus)) for gpus in counts] for name, path in MODELS.items()}
