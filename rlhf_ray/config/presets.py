"""Recipes of papers as data: what `algorithm.preset` fills in where nothing is set, each value with its source."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_ray.config.section import as_set
from rlhf_ray.config.type_union import tag_of


@dataclass(frozen=True)
class ShareOf:
    """A value in proportion to another field."""

    share: float
    field: str

    def of(self, whole: int) -> int:
        """The value, at least 1."""
        return max(1, int(self.share * whole))


@dataclass(frozen=True)
class Preset:
    """One recipe."""

    sentence: str
    values: Mapping[str, tuple[Any, str]]
    """Path of a field -> its value and where that comes from. An estimator is always among them."""

    @property
    def estimator(self) -> str:
        """The type of its estimator."""
        return str(self.values["algorithm.estimator.type"][0])


ON_POLICY = "1 pass over each batch: Shao et al. 2024, TRL, verl"
NO_KL = "TRL and slime: 0, so that no reference is started"
PRESETS = {
    "ppo": Preset("PPO with a critic, for rewards from human feedback (Schulman et al. 2017, Ouyang et al. 2022)", {
        "algorithm.estimator.type": ("gae", "Schulman et al. 2016"),
        "algorithm.estimator.gamma": (1.0, "Ziegler et al. 2019, InstructGPT"),
        "algorithm.estimator.lam": (0.95, "InstructGPT, TRL"),
        "algorithm.loss.type": ("clip", "Schulman et al. 2017, eq. 7"),
        "algorithm.loss.clip_low": (0.2, "Schulman et al. 2017"),
        "algorithm.loss.clip_high": (0.2, "Schulman et al. 2017"),
        "algorithm.value_clip": (0.2, "PPO2 (OpenAI baselines), TRL"),
        "algorithm.kl.placement": ("reward", "Ziegler et al. 2019, eq. 2"),
        "algorithm.kl.coef": (0.05, "TRL"),
        "coordinator.samples_per_prompt": (1, "InstructGPT"),
    }),
    "grpo": Preset("GRPO: a prompt's samples are compared, without a critic (Shao et al. 2024)", {
        "algorithm.estimator.type": ("grpo", "Shao et al. 2024"),
        "algorithm.epochs": (1, ON_POLICY),
        "algorithm.kl.coef": (0.0, f"{NO_KL} (Shao et al. 2024: 0.04, verl: 0.001)"),
        "coordinator.samples_per_prompt": (8, "TRL (Shao et al. 2024: 64)"),
    }),
    "dapo": Preset("DAPO: GRPO with dynamic sampling, a higher upper clip, a penalty for length (Yu et al. 2025)", {
        "algorithm.estimator.type": ("grpo", "Yu et al. 2025, eq. 9"),
        "algorithm.loss.type": ("clip", "Yu et al. 2025, eq. 8"),
        "algorithm.loss.clip_low": (0.2, "Yu et al. 2025, section 4.1"),
        "algorithm.loss.clip_high": (0.28, "Yu et al. 2025, sections 3.1 and 4.1"),
        "algorithm.aggregate": ("token", "Yu et al. 2025, section 3.3"),
        "algorithm.kl.coef": (0.0, "Yu et al. 2025, section 2.3: no penalty"),
        "algorithm.epochs": (1, "Yu et al. 2025, section 4.1"),
        "algorithm.mini_batches": (16, "Yu et al. 2025, section 4.1: 16 gradient updates for each batch of rollouts"),
        "algorithm.overlong_buffer": (ShareOf(0.2, "generator.sampling.max_tokens"),
                                      "Yu et al. 2025, section 4.1: 4096 of 20480 tokens, a fifth of the maximum"),
        "algorithm.overlong_penalty": (1.0, "Yu et al. 2025, eq. 13"),
        "algorithm.dynamic_sampling.max_batches": (10, "Yu et al. 2025, section 3.2; the number: verl and NeMo-RL"),
        "coordinator.samples_per_prompt": (16, "Yu et al. 2025, section 4.1"),
    }),
    "dr_grpo": Preset("Dr. GRPO: GRPO without the biases of its two normalisations (Liu et al. 2025)", {
        "algorithm.estimator.type": ("dr_grpo", "Liu et al. 2025: no division by the standard deviation"),
        "algorithm.aggregate": ("token", "Liu et al. 2025: no division by a response's length"),
        "algorithm.kl.coef": (0.0, "Liu et al. 2025: no penalty"),
        "algorithm.epochs": (1, ON_POLICY),
        "coordinator.samples_per_prompt": (8, "TRL"),
    }),
    "gspo": Preset("GSPO: GRPO with one probability ratio for a response (Zheng et al. 2025)", {
        "algorithm.estimator.type": ("grpo", "Zheng et al. 2025, eq. 6"),
        "algorithm.loss.type": ("clip", "Zheng et al. 2025, eq. 5"),
        "algorithm.loss.ratio": ("sequence", "Zheng et al. 2025, eq. 7"),
        "algorithm.loss.clip_low": (3e-4, "Zheng et al. 2025, section 5.1"),
        "algorithm.loss.clip_high": (4e-4, "Zheng et al. 2025, section 5.1"),
        "algorithm.aggregate": ("sequence", "Zheng et al. 2025, eq. 5"),
        "algorithm.kl.coef": (0.0, NO_KL),
        "algorithm.epochs": (1, ON_POLICY),
        "algorithm.mini_batches": (4, "Zheng et al. 2025, section 5.1"),
        "coordinator.samples_per_prompt": (8, "TRL"),
    }),
    "cispo": Preset("CISPO: no token loses its gradient, and the ratio corrects for stale samples (MiniMax 2025)", {
        "algorithm.estimator.type": ("grpo", "MiniMax 2025: advantages of GRPO"),
        "algorithm.loss.type": ("cispo", "MiniMax 2025"),
        "algorithm.loss.min_ratio": (0.0, "MiniMax 2025: no lower bound"),
        "algorithm.loss.max_ratio": (5.0, "TRL, after ScaleRL (Khatri et al. 2025), where 4 to 8 are equal"),
        "algorithm.old_logprobs": ("generator", "ScaleRL: the ratio is to the generators' probabilities"),
        "algorithm.aggregate": ("token", "MiniMax 2025"),
        "algorithm.kl.coef": (0.0, "MiniMax 2025: no penalty"),
        "algorithm.epochs": (1, ON_POLICY),
        "coordinator.samples_per_prompt": (16, "ScaleRL"),
    }),
    "rloo": Preset("RLOO: a sample's score less the mean of its prompt's other samples (Ahmadian et al. 2024)", {
        "algorithm.estimator.type": ("rloo", "Ahmadian et al. 2024"),
        "algorithm.epochs": (1, "Ahmadian et al. 2024, TRL"),
        "algorithm.kl.coef": (0.05, "TRL"),
        "coordinator.samples_per_prompt": (4, "Ahmadian et al. 2024: 2 and 4"),
    }),
    "reinforce_pp": Preset("REINFORCE++: whitened returns, with neither critic nor groups (Hu 2025)", {
        "algorithm.estimator.type": ("reinforce_pp", "Hu 2025"),
        "algorithm.kl.placement": ("reward", "Hu 2025"),
        "algorithm.kl.coef": (0.01, "OpenRLHF, by the method's author"),
        "algorithm.epochs": (1, "OpenRLHF"),
        "coordinator.samples_per_prompt": (1, "Hu 2025"),
    }),
}
"""Name of a preset -> its recipe."""


def fill(
    given: Mapping[str, Any], name: Any, inside: str = "", wholes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """What is given, with a preset's values where nothing is set; as it is for a name of no preset.

    A loss of another type than the preset's keeps its own defaults.

    Args:
        given: nested values; sections count as what is set in them.
        inside: the section that `given` is, such as "algorithm"; values of others are left out.
        wholes: values of the fields to which a `ShareOf` refers; without them such values are left out.
    """
    filled = dict(given)
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return filled
    prefix = f"{inside}." if inside else ""
    for path, value in _values(preset, given if inside else as_set(given.get("algorithm")) or {}, wholes or {}):
        if path.startswith(prefix):
            filled = _with(filled, path.removeprefix(prefix).split("."), value)
    return filled


def gives(name: str | None, path: str, value: Any) -> bool:
    """Whether a preset has this value of a field, or fields within it."""
    values = PRESETS[name].values if name else {}
    if any(inner.startswith(f"{path}.") for inner in values):
        return True
    found = values.get(path)
    return found is not None and (found[0] == value or isinstance(found[0], ShareOf))


def _values(preset: Preset, algorithm: Mapping[str, Any], wholes: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    loss = preset.values.get("algorithm.loss.type", ("clip", ""))[0]
    another_loss = tag_of(algorithm.get("loss", {}), loss) != loss
    for path, (value, _) in preset.values.items():
        if another_loss and path.startswith(("algorithm.loss.", "algorithm.old_logprobs")):
            continue
        if not isinstance(value, ShareOf):
            yield path, value
        elif value.field in wholes:
            yield path, value.of(wholes[value.field])


def _with(section: Any, keys: list[str], value: Any) -> Any:
    """`section` with `value` at a path, unless something is there or above."""
    key, *below = keys
    if isinstance(section, str) and key == "type":  # the short form of a union
        return {"type": section}
    if (values := as_set(section)) is None:
        return section
    if below:
        return {**values, key: _with(values.get(key, {}), below, value)}
    return values if key in values else {**values, key: value}
