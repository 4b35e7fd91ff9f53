"""Loads one resolved, frozen configuration from a YAML file, the environment and the command line.

The command line takes precedence over the environment, the environment over the file, and the file over the defaults.
Relative paths are relative to the working directory of the command, not to the file, and are saved as written. Code
that runs later reads the configuration and never changes it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from rlhf_ray.config.combination_checks import check_combinations
from rlhf_ray.config.conditional_fields import warn_of_idle_values, without_effect
from rlhf_ray.config.config_layers import Layer, merge, read_environment, read_overrides, read_yaml
from rlhf_ray.config.derived import (
    bucket_mb,
    buffer_capacity_mb,
    longest_row,
    placements_of,
    transport_of,
    unset_micro_batches,
)
from rlhf_ray.config.error_messages import explain, explain_option, origin, suggestion
from rlhf_ray.config.estimators import GROUP_ESTIMATORS
from rlhf_ray.config.fields import strings_of
from rlhf_ray.config.given_objects import GivenRows
from rlhf_ray.config.presets import PRESETS
from rlhf_ray.config.run import RunConfig
from rlhf_ray.config.settled import value_at, with_settled
from rlhf_ray.config.stages import (
    TRAINING,
    EvaluateConfig,
    GRPOConfig,
    PPOConfig,
    PreferencesStageConfig,
    ProcessRewardConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
    StageConfig,
)
from rlhf_ray.config.type_union import tag_of
from rlhf_ray.errors import ConfigError

C = TypeVar("C", bound=StageConfig)

STAGES: dict[str, type[StageConfig]] = {
    "sft": SFTConfig,
    "reward-model": RewardModelConfig,
    "preferences": PreferencesStageConfig,
    "process-reward": ProcessRewardConfig,
    "ppo": PPOConfig,
}
"""Stage, which is also a command -> its configuration."""
COMMANDS: dict[str, type[StageConfig]] = {
    **STAGES,
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "reinforce": ReinforceConfig,
    "evaluate": EvaluateConfig,
}
"""Command -> configuration of its stage: the stage `ppo` has four, with different defaults, and `evaluate` takes a file
of any of these."""
STARTED_WITH = (("algorithm", "estimator", "type"), ("algorithm", "epochs"), ("algorithm", "kl", "coef"),
                ("coordinator", "samples_per_prompt"))
"""Fields whose defaults the commands of the stage `ppo` differ in."""


def module_of(command: str) -> str:
    """The module of a command's stage in `rlhf_ray.stages`."""
    trains = issubclass(COMMANDS[command], PPOConfig) and command != "evaluate"
    return "ppo" if trains else command.replace("-", "_")


def load(cls: type[C], path: Path | str | None, overrides: list[str], resume: bool = False,
         has_gpus: Callable[[str | None], bool] = lambda _: False) -> C:
    """The resolved configuration of a stage.

    `path` is a YAML file (None: defaults, environment and overrides alone); `overrides` are command-line arguments
    `--section.key=value` or `--section.key value`.

    Args:
        resume: the run in `run.dir` goes on. One that was started by another command of the same stage (`grpo`, now
            `ppo`) keeps that command's defaults.
        has_gpus: whether the cluster at an address (None: a local one) may have GPUs. Then fields that need GPUs are
            accepted without pools and gpus, which are derived from the machines before the run starts.

    Values without effect are named in one warning, with their origins.

    Raises:
        ConfigError: the configuration cannot run; lists all problems, each with its field, value, origin and fix.
    """
    _refuse_unknown_options(cls, overrides)
    file = read_yaml(Path(path)) if path is not None else Layer({})
    if issubclass(cls, EvaluateConfig):
        file = _without_training(file)
    layers = [file, read_environment(cls), read_overrides(overrides, cls)]
    _refuse_unknown_variables(cls)
    values = merge(cls, layers)
    if resume and issubclass(cls, PPOConfig):
        layers = [_started_with(cls, values), *layers]
        values = merge(cls, layers)
    if isinstance(cluster := values.get("cluster"), dict) and cluster.get("derived"):
        values["cluster"] = {**cluster, "derived": _still_derived(layers)}
    try:
        given, resolved = _read(cls, values, layers)
    except ConfigError:
        later = _placed_later(cls, values, layers, has_gpus)
        if later is None:
            raise
        given, resolved = later
    idle = list(without_effect(given))
    if any(each.of_place for each in idle) and "pools" not in values and has_gpus(given.cluster.address):
        idle = [each for each in idle if not each.of_place]  # they may act where the roles are placed later
    warn_of_idle_values(idle, lambda path: origin(tuple(path.split(".")), layers))
    return resolved


OF_RUN = {"run": ("seed",), "logging": ("judge", "samples")}
"""Section -> the keys that an evaluation takes from a file for training; the others are of the training run."""
OF_STEPS = (("evaluation", "every"), ("prompts", "shuffle"), ("generator", "sleep_level"),
            ("cluster", "max_learner_restarts"))
"""What else it leaves out of such a file: section and key."""


def _without_training(file: Layer) -> Layer:
    """A file for training without what an evaluation does not use: the sections of training, places and lengths of the
    run, a reference that only a KL penalty needs, and what was derived from the machines of the run."""
    values = {name: dict(section) if isinstance(section, dict) else section for name, section in file.values.items()
              if name not in TRAINING}
    for name, keys in OF_RUN.items():
        if isinstance(values.get(name), dict):
            values[name] = {key: value for key, value in values[name].items() if key in keys}
    if isinstance(reference := values.get("reference"), dict) and not reference.get("path"):
        del values["reference"]
    for name, key in OF_STEPS:
        if isinstance(section := values.get(name), dict):
            section.pop(key, None)
    cluster = values.get("cluster")
    for path in (cluster.pop("derived", None) if isinstance(cluster, dict) else None) or ():
        section, _, key = str(path).partition(".")
        if not key:
            values.pop(section, None)
        elif isinstance(values.get(section), dict):
            values[section].pop(key, None)
    return Layer(values, file.origins)


def _read(cls: type[C], values: dict[str, Any], layers: list[Layer]) -> tuple[C, C]:
    """The configuration of these values, and the same resolved."""
    try:
        config = cls.model_validate(values)
    except ValidationError as e:
        raise ConfigError(explain(cls, e, layers)) from None
    if rows := [field for field, value in strings_of(config) if isinstance(value, GivenRows)]:
        raise ConfigError(f"{rows[0]} is a list of rows, which can be given from Python only; write them to a .jsonl "
                          "file and name it")
    return config, resolve(config)


PLENTY = {"cpus": 1e6}
"""A bundle that no machine has, so that it is replaced by what the machines have."""


def _placed_later(cls: type[C], values: dict[str, Any], layers: list[Layer],
                  has_gpus: Callable[[str | None], bool]) -> tuple[C, C] | None:
    """As `_read`, a configuration that is refused without GPUs, with every role on GPUs: whole ones, or one together.
    None if it is refused then too, or somebody set pools, or there are no GPUs."""
    cluster = values.get("cluster")
    address = cluster.get("address") if isinstance(cluster, dict) else None
    if "pools" in values or not has_gpus(address):
        return None
    given = {name: section if isinstance(section := values.get(name), dict) else {} for name in cls.model_fields}
    for below in _on_plenty(cls, given):
        derived = [f"{name}.{field}" for name, section in below.items() if name != "pools"
                   for field in section if field not in given[name]]
        filled = merge(cls, [Layer(below), Layer(values)])
        filled["cluster"] = {**filled.get("cluster", {}), "derived": ["pools", *derived]}
        with suppress(ConfigError):
            return _read(cls, filled, layers)
    return None


def _on_plenty(cls: type[StageConfig], given: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sections with values as they could be derived on many GPUs, or on one."""
    engine_of = given.get("generator", {})
    try:
        devices = int(engine_of.get("tensor_parallel", 1)) * int(engine_of.get("pipeline_parallel", 1))
        chunk = int(given.get("coordinator", {}).get("samples_per_prompt", 16))
    except (TypeError, ValueError):
        return
    store = {} if given["cluster"].get("address") else {"cluster": {"object_store_mb": 10**6}}
    learners = ("policy", "critic", "learner")
    rows = {name: {"micro_batch_tokens": 10**6} for name in (*learners, "reference", "reward")}
    many = {name: {**rows[name], "workers": 2, "gpus": 1} for name in learners}  # ZeRO divides among several
    one = {name: {**rows[name], "gpus": 0.2} for name in learners}
    for places, engine, gpus, bundles in ((many, devices, devices, 10**4), (one, 0.2, 1, 1)):
        sections = {**rows, **places, "generator": {"gpus": engine, "chunk": chunk}}
        yield {"pools": {"default": {**PLENTY, "gpus": gpus, "bundles": bundles}}, **store,
               **{name: section for name, section in sections.items() if name in cls.model_fields}}


def resolve(config: C) -> C:
    """Fill in every value that follows from others, and check that the sections fit together. Resolving twice changes
    nothing.

    For PPO: fields of `evaluation.sampling` that are not set are those of `generator.sampling`;
    `buffer.capacity_mb` is half of a local cluster's `cluster.object_store_mb` (a joined cluster sizes its own store,
    so there is no bound in bytes).
    `weights.transport: auto` becomes the transport that the placement allows, and an empty `weights.bucket_mb` the
    default for it. For every stage with a generator on CPUs, an empty `generator.kv_cache_mb` becomes its default.
    Micro-batches of learners on GPUs that nobody set hold the longest row. Pools in which no role is placed are left
    out, so that they are not reserved.

    Raises:
        ConfigError: the sections do not fit together, see `combination_checks`.
    """
    if isinstance(config, PPOConfig) and config.evaluation and (sampling := config.evaluation.sampling):
        given = {name: getattr(sampling, name) for name in sampling.model_fields_set}
        config = with_settled(config, {
            "evaluation.sampling": config.generator.sampling.model_copy(update=given)})
    if unset := unset_micro_batches(config):
        longest = longest_row(config)
        config = with_settled(config, {path: longest for path in unset if value_at(config, path) < longest})
    check_combinations(config)
    if used := {placement.pool for placement in placements_of(config).values()}:
        pools = {name: pool for name, pool in config.pools.items() if name in used}
        config = with_settled(config, {"pools": pools})
    values: dict[str, Any] = {}
    if isinstance(config, PPOConfig | PreferencesStageConfig):
        values["generator.kv_cache_mb"] = config.generator.cache_mb
    if isinstance(config, PPOConfig):
        values["buffer.capacity_mb"] = buffer_capacity_mb(config.buffer, config.cluster)
        values["weights.transport"] = transport_of(config)
        values["weights.bucket_mb"] = bucket_mb(config)
        if config.weights.transport == "auto":
            values["cluster.derived"] = sorted({*config.cluster.derived, "weights.transport"})
    return with_settled(config, values)


def _started_with(cls: type[PPOConfig], values: dict[str, Any]) -> Layer:
    """The values of `STARTED_WITH` of the run in `run.dir`; empty without a checkpoint there, and for an estimator, or
    a preset of one, that is set now and is another one. Where the command and the run have the defaults of `ppo`, only
    the samples of a group, whose default follows from the estimator."""
    run = values.get("run")
    named = run.get("dir") if isinstance(run, dict) else None
    try:
        directory = Path(RunConfig.model_validate({} if named is None else {"dir": named}).dir)
    except ValidationError:  # reported with the other problems
        return Layer({})
    if not any(directory.glob("checkpoints/step_*")) or not (directory / "config.yaml").is_file():
        return Layer({})
    saved = read_yaml(directory / "config.yaml")
    started: dict[str, Any] = {}
    for *sections, name in STARTED_WITH:
        found: Any = saved.values
        kept = started
        for section in sections:
            found = found.get(section) if isinstance(found, dict) else None
            kept = kept.setdefault(section, {})
        if isinstance(found, dict) and name in found:
            kept[name] = found[name]
    estimator, algorithm = started["algorithm"]["estimator"].get("type"), values.get("algorithm")
    given = algorithm if isinstance(algorithm, dict) else {}
    preset = PRESETS.get(str(given.get("preset")))
    set_now = tag_of(given.get("estimator", {}), preset.estimator if preset else str(estimator))
    if set_now is not None and set_now != estimator:
        return Layer({})
    if cls is PPOConfig and estimator not in COMMANDS:
        started = {"coordinator": started["coordinator"]} if estimator in GROUP_ESTIMATORS else {}
    return Layer(started, saved.origins)


def _still_derived(layers: list[Layer]) -> list[str]:
    """The fields that `cluster.derived` of a saved configuration names, without those that a later layer sets."""
    names: list[str] = []
    for layer in layers:
        given = {".".join(path) for path in layer.origins}
        names = [name for name in names if not any(f"{path}.".startswith(f"{name}.") for path in given)]
        if isinstance(cluster := layer.values.get("cluster"), dict) and isinstance(cluster.get("derived"), list):
            names = cluster["derived"]
    return names


def as_yaml(config: StageConfig) -> str:
    """A configuration as YAML that `load` reads back to an equal one."""
    unused = set(TRAINING) if isinstance(config, EvaluateConfig) else None
    return yaml.safe_dump(config.model_dump(mode="json", exclude=unused), sort_keys=False, allow_unicode=True)


def _refuse_unknown_options(cls: type[StageConfig], overrides: list[str]) -> None:
    """Refuse an --option without a value if the stage has no such section: adding a value would not help."""
    for argument, following in pairwise([*overrides, "--"]):
        section = argument.removeprefix("--").split(".")[0]
        bare = argument.startswith("--") and "=" not in argument and following.startswith("--")
        if bare and section not in cls.model_fields:
            raise ConfigError(explain_option(cls, argument))


def _refuse_unknown_variables(cls: type[StageConfig]) -> None:
    """Refuse RLHF_RAY_SECTION__KEY if no stage has that section: a misspelt variable would silently have no effect."""
    known = {name for stage in {cls, *STAGES.values()} for name in stage.model_fields}
    for variable in os.environ:
        section, delimiter, _ = variable.lower().removeprefix("rlhf_ray_").partition("__")
        if variable.lower().startswith("rlhf_ray_") and delimiter and section not in known:
            raise ConfigError(
                f"environment variable {variable}: there is no section {section}; {suggestion(section, sorted(known))}"
            )
