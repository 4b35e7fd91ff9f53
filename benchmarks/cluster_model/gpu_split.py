"""One update of the whole loop on a given number of GPUs: how they are split, and how long a step takes.

With staleness 0 the sides take turns. With 1 a batch is drawn while the one before is learned from, and has to be
whole, its longest response included, when its turn comes: a response that is not done by then began two versions
before. From 2 on responses may reach over a publication, so drawing never runs dry, as long as the longest one takes
no more than (staleness - 1) steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.model_shape import LLAMA_70B, ModelShape
from rlhf_ray.planning.roofline import STATE_BYTES, Duration, Engine, Group, Workload, longer

STALENESS = (0, 1, 2, 3, 4)
TENSOR_PARALLEL = (2, 4, 8)
IN_FLIGHT = 10
"""Numbers of responses under way that are tried, each a square root of two fewer than the one before."""


@dataclass(frozen=True)
class Split:
    """Who gets how many GPUs."""

    generators: int
    tensor_parallel: int
    learners: int
    """Half for policy and reference, half for critic and reward model, which work side by side."""
    staleness: int


@dataclass(frozen=True)
class Step:
    """Where a step's time goes, in seconds; parts of different pools overlap."""

    split: Split
    generation: float
    scoring: float
    training: float
    publishing: float
    """Of the whole publication; a pause of `pause` of it is charged to generation."""
    pause: float
    seconds: float
    """Of the whole step; infinite where the split cannot work."""
    bound: str
    """What would have to be faster for the step to be."""
    samples: int
    shared: bool = False
    """All roles on the same GPUs, in turns; `split` then gives all of them to both sides."""

    @property
    def samples_per_second(self) -> float:
        """Of the whole loop."""
        return self.samples / self.seconds


def step(policy: ModelShape, hardware: Hardware, work: Workload, split: Split) -> Step:
    """The step of one split."""
    engine = Engine(policy, hardware, split.tensor_parallel)
    engines = split.generators // split.tensor_parallel
    group = Group(policy, hardware, split.learners // 2)
    share = work.samples / engines
    publishing, pause = publication(engine)
    scoring, training = group.score(work, models=2), group.update(work)
    learning = scoring + training
    batch = Duration(engine.batch_s(work, share) + pause, drawing_bound(engine, work, share))
    if split.staleness == 0:
        # Rollouts are scored as they finish, on GPUs that do not train yet.
        drawn = longer(batch, scoring)
        whole = drawn + training + Duration(publishing - pause, "publishing")
        generation = batch.seconds - pause
    else:
        drawn, generation = drawing(engine, work, share, split.staleness, learning, batch, pause)
        whole = longer(drawn, learning, Duration(publishing, "publishing"))
    return Step(split, generation, scoring.seconds, training.seconds, publishing, pause, whole.seconds, whole.bound,
                work.samples)


def taking_turns(policy: ModelShape, hardware: Hardware, work: Workload, gpus: int, tensor_parallel: int) -> Step:
    """The step where all roles share all GPUs and take turns, each put aside in main memory meanwhile: no pool waits
    for another, and nothing overlaps."""
    engine, group = Engine(policy, hardware, tensor_parallel), Group(policy, hardware, gpus // 2)
    share = work.samples * tensor_parallel / gpus
    drawn = Duration(engine.batch_s(work, share), drawing_bound(engine, work, share))
    scoring, training = group.score(work, models=2), group.update(work)
    _, pause = publication(engine)
    put_aside = 2 * 2 * policy.parameters * STATE_BYTES / gpus / hardware.host_bandwidth  # two models, out and in
    whole = drawn + scoring + training + Duration(pause + put_aside, "putting roles aside")
    return Step(Split(gpus, tensor_parallel, gpus, 0), drawn.seconds, scoring.seconds, training.seconds,
                pause + put_aside, pause, whole.seconds, whole.bound, work.samples, shared=True)


def drawing(
    engine: Engine, work: Workload, share: float, staleness: int, learning: Duration, batch: Duration, pause: float
) -> tuple[Duration, float]:
    """The generators' side of a step with staleness: how long it takes, and how much of that they compute.

    Fewer responses under way make each of them faster and all of them slower, so the best of some numbers is taken.
    """
    options = [(batch, batch.seconds)]  # nobody is made to use the staleness that is allowed
    for number in range(IN_FLIGHT if staleness > 1 else 0):
        under_way = staleness * share / 2 ** (number / 2)
        flowing = engine.flowing_s(work, share, under_way) + pause
        longest = engine.longest_s(work, under_way) / (staleness - 1)
        options.append((longer(Duration(flowing, flowing_bound(engine, work, under_way)),
                               Duration(longest, "longest response")), flowing))
    best_one, computing = min(options, key=lambda option: option[0].seconds)
    return best_one, computing - pause


def publication(engine: Engine) -> tuple[float, float]:
    """Seconds of a publication and of the pause in it: one copy to each node over its cards, all nodes at a time, while
    the GPUs go on; then each GPU takes its part from the node's memory."""
    h = engine.hardware
    sent = engine.model.weight_bytes / (h.network_bandwidth * h.network_share)
    pause = engine.model.weight_bytes / engine.gpus / h.host_bandwidth
    return sent + pause, pause


def drawing_bound(engine: Engine, work: Workload, share: float) -> str:
    """What drawing a whole batch waits for: its longest response, where that alone takes most of the time."""
    alone = work.longest * engine.decode_s(1, work.held)
    return "longest response" if 2 * alone > engine.batch_s(work, share) else flowing_bound(engine, work, share)


def flowing_bound(engine: Engine, work: Workload, under_way: float) -> str:
    """What decoding waits for."""
    fitting = engine.fitting(work)
    if not engine.reads_most(min(under_way, fitting), work.held):
        return "operations of decoding"
    return "room of the cache" if fitting < under_way else "memory bandwidth of decoding"


def splits(gpus: int, staleness: int, parts: int = 16) -> Iterator[Split]:
    """Ways to split `gpus`, the generators' share in `parts` steps of whole engines."""
    for tensor_parallel in TENSOR_PARALLEL:
        for part in range(1, parts):
            generators = gpus * part // parts // tensor_parallel * tensor_parallel
            if generators and gpus - generators >= 2:
                yield Split(generators, tensor_parallel, gpus - generators, staleness)


def best(policy: ModelShape, hardware: Hardware, work: Workload, gpus: int, staleness: int) -> Step | None:
    """The fastest step on `gpus`; None where nothing fits."""
    found = min((step(policy, hardware, work, split) for split in splits(gpus, staleness)),
                key=lambda made: made.seconds)
    return None if found.seconds == inf else found


def smallest_good(steps: list[Step], within: float = 0.02) -> Step:
    """Of the best steps by staleness, the least stale that is `within` of the fastest."""
    fastest = min(made.seconds for made in steps)
    good = [made for made in steps if made.seconds <= (1 + within) * fastest]
    return min(good, key=lambda made: made.split.staleness)


GPU_COUNTS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Answer:
    """What the model says of one number of GPUs."""

    gpus: int
    by_staleness: list[Step]
    """The best split of each staleness, ascending."""
    turns: Step | None
    """All roles sharing all GPUs; None where that does not fit."""
    recommended: Step
    """The least stale of those within 2% of the fastest."""


def answer(hardware: Hardware, work: Workload, gpus: int, policy: ModelShape = LLAMA_70B) -> Answer | None:
    """All that can be said of `gpus`; None where the model does not fit on them."""
    found = [made for staleness in STALENESS if (made := best(policy, hardware, work, gpus, staleness))]
    if not found:
        return None
    turns = min((taking_turns(policy, hardware, work, gpus, parallel) for parallel in TENSOR_PARALLEL),
                key=lambda made: made.seconds)
    return Answer(gpus, found, turns if turns.seconds < float("inf") else None, smallest_good(found))


def answers(hardware: Hardware, work: Workload, counts: Sequence[int] = GPU_COUNTS) -> list[Answer]:
    """Those numbers of GPUs on which the model fits."""
    return [found for gpus in counts if (found := answer(hardware, work, gpus))]
