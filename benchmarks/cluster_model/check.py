"""The model's formulas against measured roles: constants of one core from a few cells, every other cell predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from benchmarks.growth.cells import Cell
from benchmarks.growth.settings import PROMPT, SEQUENCES, SIZES, VOCABULARY, Size
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.memory_breakdown import Memory
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.roles import Role
from rlhf_ray.planning.roofline import KEPT, Engine, Workload
from rlhf_ray.planning.step_time import CALL_S, scoring_s, update_s

SMALLEST, FITTED, LENGTH = "1M", ("25M", "5M"), 128
"""Sizes and length of the cells from which constants come: those of the first size in `FITTED` that was measured
whole, and one of the smallest, for the cost of a step alone."""
SCORING = ("reference", "reward", "log-probabilities", "values")
UNKNOWN = Hardware(
    name="one core", flops=1.0, memory_bytes=1e12, memory_bandwidth=1.0, gpus_per_node=1, link_bandwidth=1.0,
    network_bandwidth=1.0, host_bandwidth=1.0, training_share=1.0, forward_share=1.0, memory_share=1.0,
    network_share=1.0, usable_memory=1.0, hop_s=0.0, network_hop_s=0.0, collective_s=0.0, step_s=0.0)
"""Rates are put in as they are found; shares of peaks are in them already."""


@dataclass(frozen=True)
class Prediction:
    """A cell, and what the formulas say."""

    cell: Cell
    seconds: float
    fitted: bool
    """Whether a constant comes from this cell."""

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.seconds / median(self.cell.seconds)


def shape_of(size: Size) -> ModelShape:
    """A measured model's shape, in float32."""
    return ModelShape(hidden=size.hidden, layers=size.layers, heads=size.heads, kv_heads=size.heads,
                      intermediate=3 * size.hidden, vocabulary=VOCABULARY, tied=True, bytes_per_value=4)


def fitted_hardware(cells: Sequence[Cell]) -> tuple[Hardware, list[Cell]]:
    """One core's constants, and the cells they come from.

    Raises:
        ValueError: one of those cells was not measured.
    """
    used: list[Cell] = []
    fitted = fitted_size(cells)

    def seconds(activity: str, size: str, length: int) -> float:
        cell = next(c for c in cells if (c.activity, c.size, c.length) == (activity, size, length) and c.seconds)
        used.append(cell)
        return median(cell.seconds)

    shape, work = shape_of(fitted), workload(fitted, LENGTH)
    forward = work.samples * shape.row_flops(work.row) / seconds("reference", fitted.name, LENGTH)
    training = KEPT * work.samples * shape.row_flops(work.row) / seconds("policy update", fitted.name, LENGTH)
    core = replace(UNKNOWN, flops=forward, training_share=training / forward,
                   network_bandwidth=shape.weight_bytes / seconds("send weights", fitted.name, 0),
                   host_bandwidth=shape.weight_bytes / seconds("receive weights", fitted.name, 0))
    smallest_s = seconds("generation", SMALLEST, LENGTH)
    return with_decoding(core, fitted, smallest_s, seconds("generation", fitted.name, LENGTH)), used


def fitted_size(cells: Sequence[Cell]) -> Size:
    """The size from which constants come; errors as in `fitted_hardware`."""
    needed = {("reference", LENGTH), ("policy update", LENGTH), ("generation", LENGTH), ("send weights", 0),
              ("receive weights", 0)}
    there = {size.name: {(c.activity, c.length) for c in cells if c.size == size.name and c.seconds} for size in SIZES}
    found = next((size for name in FITTED for size in SIZES if size.name == name and needed <= there[name]), None)
    if found is None or ("generation", LENGTH) not in there[SMALLEST]:
        raise ValueError(f"neither {' nor '.join(FITTED)} was measured whole, or {SMALLEST} was not; run "
                         f"`python -m benchmarks.growth --sizes {SMALLEST} {FITTED[0]}`")
    return found


def with_decoding(core: Hardware, fitted: Size, smallest_s: float, fitted_s: float) -> Hardware:
    """`core` with the bandwidth of decoding and the cost of a step that does not depend on the model, from two sizes:
    step = bytes read / bandwidth + cost, two equations. Where the bandwidth found would leave a step shorter than its
    operations take, it is these that bound it, and reading is taken to be free."""
    drawn = Workload(SEQUENCES, PROMPT, LENGTH, tail=1.0)
    shapes = [shape_of(next(s for s in SIZES if s.name == SMALLEST)), shape_of(fitted)]
    steps = [(whole - SEQUENCES * Engine(shape, core, 1).prefill_s(PROMPT)) / LENGTH
             for shape, whole in zip(shapes, (smallest_s, fitted_s), strict=True)]
    read = [shape.weight_bytes + SEQUENCES * drawn.held * shape.cache_bytes for shape in shapes]
    compute = [SEQUENCES * shape.token_flops(drawn.held) / core.flops for shape in shapes]
    bandwidth = (read[1] - read[0]) / max(steps[1] - steps[0], 1e-9)
    if read[1] / bandwidth < compute[1]:
        return replace(core, memory_bandwidth=float("inf"), step_s=max(0.0, steps[0] - compute[0]))
    return replace(core, memory_bandwidth=bandwidth, step_s=max(0.0, steps[0] - read[0] / bandwidth))


def workload(size: Size, length: int) -> Workload:
    """The rows of a forward or training cell."""
    return Workload(size.rows(length), PROMPT, length, tail=1.0, mini_batches=1)


def predict(cell: Cell, core: Hardware) -> float:
    """Seconds of one repeat by the formulas of `rlhf-ray plan`, less the fixed cost of calls, which a cell does not
    make."""
    size = next(s for s in SIZES if s.name == cell.size)
    shape = shape_of(size).headless() if cell.activity in ("reward", "values", "critic update") else shape_of(size)
    engine, role = Engine(shape_of(size), core, 1), Role("learner", LearnerConfig(), (shape,), "", lambda _: Memory())
    if cell.activity == "generation":
        return engine.batch_s(Workload(SEQUENCES, PROMPT, cell.length, tail=1.0), SEQUENCES)
    if cell.activity in SCORING:
        return scoring_s(role, core, workload(size, cell.length)) - CALL_S
    if cell.activity in ("policy update", "critic update"):
        return update_s(role, core, workload(size, cell.length)) - CALL_S / 4
    rate = core.host_bandwidth if cell.activity == "receive weights" else core.network_bandwidth * core.network_share
    return engine.model.weight_bytes / rate


def predictions(cells: Sequence[Cell]) -> list[Prediction]:
    """Every measured cell; errors as in `fitted_hardware`."""
    core, used = fitted_hardware(cells)
    return [Prediction(cell, predict(cell, core), cell in used) for cell in cells if cell.seconds]


def typical_error(found: Sequence[Prediction]) -> float:
    """Median factor by which predictions of cells that no constant comes from are off, less one."""
    return exp(median(abs(log(p.ratio)) for p in found if not p.fitted)) - 1
