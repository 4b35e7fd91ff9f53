"""The parts of the check: what each of their checks catches, what it needs, and where it is.

Nothing heavy is imported here: a check is imported in the process that runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec


@dataclass(frozen=True)
class Check:
    """One process of the check."""

    part: str
    name: str
    catches: str
    """What is wrong where one of its rows is."""
    seconds: float
    """What it is expected to take on an H200: measured in `seams`, `learner` (but `cpu_adam`) and `updates`."""
    least_s: float | None = None
    """What must be left to begin it, if it makes several measurements and leaves out those for which no time is left;
    None for `seconds`."""
    package: str = __package__
    """Where the module `part` has the generator `name` of its rows."""


@dataclass(frozen=True)
class Part:
    """Checks that need the same packages."""

    name: str
    says: str
    packages: tuple[str, ...]
    """What they import besides torch and transformers."""
    checks: tuple[Check, ...]

    def missing(self) -> list[str]:
        """Those of its packages that are not installed here."""
        return [package for package in self.packages if find_spec(package) is None]


def _part(name: str, says: str, packages: tuple[str, ...], **checks: tuple[float, str] | tuple[float, str, float]
          ) -> Part:
    return Part(name, says, packages, tuple(_check(name, key, *entry) for key, entry in checks.items()))


def _check(part: str, name: str, seconds: float, catches: str, least_s: float | None = None) -> Check:
    return Check(part, name, catches, seconds, least_s)


WHEELS = ("deepspeed", "pydantic")
"""What `launch/gpu_wheels` brings to an image that has torch and transformers."""
PARTS = {part.name: part for part in (
    _part(
        "seams", "Functions with a path of their own on GPUs, each alone.", (),
        attention=(22, "another torch's variable-length kernel that computes other values or gradients than the "
                       "grids, or is slower than they are"),
        logprobs=(20, "log-probabilities, entropies or gradients that lose digits over 128,256 logits in bfloat16, or "
                      "copy all of them"),
        fingerprints=(8, "digests that differ between GPU and CPU, by which every publication over nccl and ipc would "
                          "be refused, or that take as long as the transfer"),
        ipc=(12, "GPU memory that stays occupied after another process has read it by handle, which fills the GPU "
                 "publication by publication"),
    ),
    _part(
        "learner", "`PolicyLearner` in one process, without Ray and vLLM.", WHEELS,
        update=(60, "updates in float32 although bfloat16 is configured, a slow update, passes that wait for the GPU, "
                    "a plan of memory that is off, slow publications, optimizer state that stays on the GPU between "
                    "phases"),
        adapters=(55, "the same of adapters on 8 billion frozen weights"),
        gradients=(55, "recomputed activations, chunked logits or sharded weights that change the gradients"),
        resume=(60, "checkpoints that lose a bit of weights, moments, counters or random numbers, at one ZeRO stage or "
                    "between two"),
        roles=(50, "files that are loaded with other weights, a reference that disagrees with the policy, values that "
                   "have the digits of bfloat16"),
        cpu_adam=(100, "an optimizer in main memory that does not compile here, or makes another step"),
    ),
    _part(
        "updates", "Settings of `PolicyLearner` side by side, with models of 1, 3 and 8 billion weights.", WHEELS,
        settings=(220, "settings that cost more than they should, compiled layers that compute other gradients or are "
                       "compiled again, an update that is slower than one by torch and transformers alone, attention "
                       "or a part of a publication that takes the time", 30),
    ),
    _part(
        "generation", "vLLM by itself in one process, with dummy weights of models of 1 and 8 billion.",
        (*WHEELS, "vllm"),
        large=(95, "an engine of 8 billion weights that does not start here, decodes far slower than it reads its "
                   "weights, or does not give its memory back in sleep", 60),
        small=(60, "the same of 1 billion, log-probabilities or seeds that slow a decoding step down", 45),
        offloaded=(45, "CUDA graphs that slow sleep down, or keep their memory, although they are offloaded", 30),
    ),
    _part(
        "engine", "One generator with vLLM and one learner, on one GPU.", (*WHEELS, "ray", "vllm"),
        ipc_handles=(90, "generators that read the learner's memory by handle and compute with other weights, buckets "
                         "of 256 or 1,024 MiB that take long, memory that level 2 of sleep does not give back", 60),
        object_store=(130, "the same through main memory, with weights sharded by ZeRO-3 and level 1 of sleep; slow "
                           "generation over 128,256 tokens, a plan of memory that is off"),
        adapters=(90, "adapters that vLLM computes with differently from the learner"),
    ),
    _part(
        "cluster", "Processes that come, go, or have a GPU each.", (*WHEELS, "ray", "vllm"),
        restart=(120, "a lost generator that finds no memory beside a live learner, or does not catch up"),
        nccl=(120, "broadcasts between GPUs that hang, or arrive with other weights"),
        whole_run=(150, "a run of all roles on one GPU that does not work, or does not continue where it ended", 60),
    ),
    _part(
        "episodes", "Runs with episodes of several turns.", (*WHEELS, "ray", "vllm"),
        continued=(180, "environments and agents with which a run on a GPU does not work, or whose episodes begin "
                        "again after a kill -9 in the middle of a step", 60),
    ),
)}


@dataclass(frozen=True)
class Plan:
    """Checks for a GPU that can be had for minutes, most valuable first."""

    says: str
    seconds: float
    """When it ends by its own clock."""
    checks: tuple[str, ...]

    @property
    def parts(self) -> list[Part]:
        """Its checks, in order."""
        return [one_check_each()[name] for name in self.checks]


PLANS = {
    "updates": Plan("settings of updates of 1, 3 and 8 billion weights, attention, parts of a publication", 240,
                    ("updates:settings",)),
    "engine": Plan("vLLM's start, speed and sleep; then publications to it", 180,
                   ("generation:large", "engine:ipc_handles", "generation:small", "generation:offloaded")),
    "run": Plan("PPO of all roles on one GPU, seconds and share of the peak of each phase, ended and resumed", 150,
                ("cluster:whole_run",)),
}
"""By name, in the order in which they are worth running on a new GPU."""


def text() -> str:
    """All checks with what they catch, for `--help`."""
    lines = ["plans:", *(f"  {name:<13} {plan.seconds:g} s: {plan.says}" for name, plan in PLANS.items())]
    for part in PARTS.values():
        needs = f" Needs {', '.join(part.packages)}." if part.packages else ""
        lines += ["", f"{part.name}: {part.says}{needs}", *(f"  {c.name:<13} {c.catches}" for c in part.checks)]
    return "\n".join(lines)


def one_check_each() -> dict[str, Part]:
    """Parts of a single check, by names such as "learner:update"."""
    return {f"{part.name}:{check.name}": replace(part, checks=(check,))
            for part in PARTS.values() for check in part.checks}


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts named, and parts of the single checks named, in the order of `PARTS`; without names, those whose
    packages are here."""
    if not names:
        return [part for part in PARTS.values() if not part.missing()]
    whole = [part for part in PARTS.values() if part.name in names]
    return whole + [part for name, part in one_check_each().items() if name in names and part.name not in names]
