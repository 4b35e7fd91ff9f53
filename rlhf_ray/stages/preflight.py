"""Checks before Ray starts: data files, models that fit together, memory, and the run that is resumed."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from rlhf_ray.checkpoint.remote import RemoteDirectory
from rlhf_ray.checkpoint.state_files import load_state
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cluster.nodes import nodes_of_cluster
from rlhf_ray.config.data import DataSection, StepsConfig
from rlhf_ray.config.derived import over_context, unset_micro_batches
from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.load import resolve
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.config.settled import is_set, value_at, with_derived
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.coordinator.recovery import Geometry, check_geometry
from rlhf_ray.data.inspection import inspect
from rlhf_ray.data.row_readers import WHOLE, Split, check_data_set_on_hub, has_local_rows, local_files, split_of
from rlhf_ray.data.tokenizer import check_vocabulary, tokenizer_digest
from rlhf_ray.errors import CheckpointError, ConfigError, DataError, ModelError
from rlhf_ray.models.config_json import context_of, local_configuration, pretrained_config
from rlhf_ray.models.hub import config_from_hub
from rlhf_ray.models.loading import check_model_directory, load_tokenizer
from rlhf_ray.models.lora_targets import check_targets
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.planning.gpu_settings import (
    checked,
    derive_gpu_settings,
    fits,
    machine_fields,
    machines_of,
    without_placement,
)
from rlhf_ray.planning.local_machine import CPU_ENGINE, GPU_ENGINE, installed_engines, this_machine
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.planning.plan import make_plan

C = TypeVar("C", bound=StageConfig)

FIRST_ROWS = 1000
"""Rows of each file that are checked before anything starts; takes a moment."""


def check_data(config: DataSection) -> None:
    """Refuse data sets that are missing or empty, and fields of the Hub for a local directory.

    Raises:
        DataError: naming the field and the path.
    """
    for field, part in config.named_parts():
        if part.numbers is not None:
            continue
        check_data_file(part.location, field, part.revision, part.subset, split_of(part))
        for key in ("subset", "revision"):
            if (value := getattr(part, key)) is not None and Path(part.location).is_dir():
                raise DataError(f"{config.SECTION}.{key}={value!r} has no effect: {part.location} is a directory, not "
                                "a data set of the Hub; leave it out")


def check_first_rows(
    config: DataSection, model: ModelConfig | NewModelConfig, steps: StepsConfig | None = None
) -> None:
    """Refuse local data whose first rows cannot be read as configured, or of which no row is left where these are all.
    The other rows are checked when everything is loaded.

    Args:
        steps: the format of steps, for process-labelled rows.

    Raises:
        DataError, ModelError: naming the rows.
    """
    tokenizer = load_tokenizer(model)
    for part in config.parts():
        if has_local_rows(part):
            limit = min(part.limit or FIRST_ROWS, FIRST_ROWS)
            first = part.model_copy(update={"limit": limit})
            found = inspect(first, tokenizer, 0, steps, model)
            found.row_errors.check()
            if found.report.rows < limit or part.limit == limit:
                found.report.require_rows()


def check_data_file(path: str, field: str, revision: str | None = None, subset: str | None = None,
                    split: Split = WHOLE) -> None:
    """Refuse a data file that is missing, empty or of an unknown format, and a name that is not on the Hub, or has no
    such split there.

    Raises:
        DataError: naming the field and the path.
    """
    try:
        files = local_files(path)
        if files is None and not Path(path).is_dir():
            check_data_set_on_hub(path, revision, subset, split)
    except DataError as error:
        raise DataError(f"{field}={error}") from None  # it begins with the path
    for file in files or ():
        if file.stat().st_size == 0:
            raise DataError(f"{field}={file} is empty; it needs at least one row")


def check_model(config: ModelConfig | NewModelConfig, field: str, require_eos: bool = True) -> None:
    """Refuse a model that does not exist, that lacks ids of its tokenizer, or whose files name something other than its
    tokens as ends of a response.

    Args:
        require_eos: see `load_tokenizer`.

    Raises:
        ModelError: naming the field and the path.
        ConfigError: a revision of a local directory.
    """
    if isinstance(config, NewModelConfig):
        named_stop_tokens(load_tokenizer(config))
        return
    check_model_directory(config, field)
    if require_eos:
        check_end_tokens(config, field)
    if config.revision is not None and not config.trust_remote_code and Path(config.path).is_dir():
        raise ConfigError(f"{field}.revision={config.revision!r} has no effect: {config.path} is a directory, not "
                          "model of the Hub; leave it out")
    size = local_configuration(config).get("vocab_size")
    if size is not None:
        check_vocabulary(load_tokenizer(config, require_eos), size, config.path)


def check_end_tokens(config: ModelConfig, field: str) -> None:
    """Refuse a model whose files name something other than its tokens as ends of a response, or cannot be read.

    Raises:
        ModelError: naming the field, the file and the value.
    """
    try:
        named_stop_tokens(load_tokenizer(config), config)
    except ModelError as error:
        raise ModelError(f"{field}.path={config.path!r}: {error}") from None


def check_same_tokens(first: ModelConfig, second: ModelConfig, fields: tuple[str, str],
                      remedy: str = "Train the reward model on the policy's tokenizer.") -> None:
    """Refuse two models whose token ids mean different texts, and a second model with fewer embeddings than the first,
    since the first can sample any id that it has.

    Args:
        remedy: for different tokenizers.

    Raises:
        ModelError: naming both fields.
    """
    if tokenizer_digest(load_tokenizer(first)) != tokenizer_digest(load_tokenizer(second)):
        raise ModelError(f"{fields[0]} ({first.path!r}) and {fields[1]} ({second.path!r}) have different tokenizers: "
                         f"the same token ids would mean different texts. {remedy}")
    known, drawn = (local_configuration(model).get("vocab_size") for model in (second, first))
    if known is not None and drawn is not None and known < drawn:
        raise ModelError(f"{fields[1]} ({second.path!r}) has {known} embeddings and {fields[0]} ({first.path!r}) has "
                         f"{drawn}: it has none for ids from {known} on, which the policy can sample. Resize its "
                         f"embeddings to {drawn}.")


def check_adapters(learner: LearnerConfig, model: ModelConfig | NewModelConfig, field: str, scalar: bool) -> None:
    """Refuse adapters for layers that the model does not have, and adapters on a model with random weights.

    Args:
        scalar: the model is trained with a scalar head instead of its output head.

    Raises:
        ConfigError: the model has random weights.
        ModelError: naming the field, the value and the layers that exist.
    """
    if learner.lora is None:
        return
    if isinstance(model, NewModelConfig):
        raise ConfigError(f"{field}.lora trains adapters on a frozen model, and model.architecture makes a model "
                          f"with random weights, which would stay random; leave {field}.lora empty or set model.path")
    check_targets(learner.lora.targets, model, f"{field}.lora.targets", scalar)


def context_length(config: ModelConfig | NewModelConfig) -> int | None:
    """Context of a new or local model in tokens; None when it has no limit, or the model is on the Hub."""
    if isinstance(config, NewModelConfig):
        return config.architecture.max_positions
    return context_of(pretrained_config(config)) if Path(config.path).is_dir() else None


def check_row_length(config: ModelConfig | NewModelConfig, tokens: int, field: str) -> None:
    """Refuse rows longer than a model's context.

    Raises:
        ModelError: naming the field, its value and the limit.
    """
    longest = context_length(config)
    if longest is not None and tokens > longest:
        raise ModelError(f"{field}={tokens} tokens is over the context of {_name(config)!r}, {longest}; lower it")


def _name(config: ModelConfig | NewModelConfig) -> str:
    return "the new model" if isinstance(config, NewModelConfig) else config.path


def check_context(config: ModelConfig, tokens: int, fields: str) -> None:
    """Refuse samples that are longer than the model's context.

    Args:
        tokens: of the longest sample.
        fields: which set it, with their values, as in `Derived.longest_sample_field`.

    Raises:
        ModelError: naming the fields and the context.
    """
    longest = context_length(config)
    if longest is not None and tokens > longest:
        raise ModelError(over_context(tokens, fields, config.path, longest))


def check_stop_tokens(config: ModelConfig, sampling: SamplingConfig | None, field: str) -> None:
    """Refuse stop tokens that a local model does not have.

    Raises:
        ConfigError: naming the field, its value and the vocabulary.
    """
    size = local_configuration(config).get("vocab_size")
    if sampling is not None and size is not None and max(sampling.stop_token_ids, default=0) >= size:
        raise ConfigError(f"{field}={sampling.stop_token_ids}: {config.path!r} has no token "
                          f"{max(sampling.stop_token_ids)}, only 0 to {size - 1}; remove it")


def check_engine(cluster: ClusterConfig, generator: GenerationConfig) -> None:
    """Refuse generators on CPUs with vLLM's build for GPUs, and the other way round. Skipped for a cluster that is
    joined, whose nodes may have other packages, and without vLLM.

    Raises:
        ConfigError: which build is needed.
    """
    engines = installed_engines()
    needed, extra = (GPU_ENGINE, "gpu") if generator.gpus else (CPU_ENGINE, "cpu")
    if cluster.address is not None or not engines or needed in engines:
        return
    text = ", ".join(f"{name} {version}" for name, version in engines.items())
    raise ConfigError(f"generator.gpus={generator.gpus:g} needs {needed}, vLLM's build for {extra.upper()}s, but "
                      f"{text} is installed; install the other one (make install EXTRA={extra}), or set "
                      f"generator.gpus and the gpus of its pool {'to 0' if generator.gpus else 'above 0'}")


def with_gpu_settings(config: C, resume: bool) -> C:
    """The configuration with settings for the machines' GPUs in place of those that nobody made, as
    `planning.gpu_settings` derives them; the same configuration without GPUs. Beside pools that somebody set, only the
    learners' `micro_batch_tokens` are derived.

    A resume takes them from the run's config.yaml, and derives again only those that its machines cannot give.

    Raises:
        ConfigError: no layout goes with what is set, or config.yaml of the run cannot be read.
        ClusterError: the cluster at `cluster.address` cannot be reached.
    """
    say = logging.getLogger(__name__).warning
    former = _former_settings(config) if resume else None
    if former is not None:
        if "pools" not in former:  # of a run that was placed by its own pools, or on CPUs
            if "pools" in config.cluster.derived:
                return checked(without_placement(config))
            return _with_kept_or_derived_micro_batches(config, former) if is_set(config, "pools") else config
        config = with_derived(without_placement(config), former)
    names = machine_fields(config)
    if is_set(config, "pools"):
        return _with_kept_or_derived_micro_batches(checked(without_placement(config)) if former else config, None)
    nodes = _machines(config)
    if "pools" in names:
        if _can_give(config, nodes):
            return resolve(config)
        config = without_placement(config)
    machines = machines_of(nodes)
    if machines is None:
        if former:
            say(f"the machines have no GPUs now, so the run's settings for them are left out: {', '.join(names)}")
        return checked(config) if former or "pools" in names else config
    try:
        config = derive_gpu_settings(config, nodes, partial(shape_of, fetch=config_from_hub))
    except ModelError as error:
        say(f"no settings for {machines.gpus} x {machines.device.name} can be derived: {error}; set pools, and the "
            "workers and gpus of roles, or the run stays on CPUs")
        return checked(config)
    derived = f"{', '.join(machine_fields(config))} for {machines.gpus} x {machines.device.name}"
    say(f"the machines cannot give the run's former settings; derived again: {derived}" if former else
        f"derived, since nobody set them (`rlhf-ray plan` says why): {derived}")
    return config


def _with_kept_or_derived_micro_batches(config: C, former: Mapping[str, Any] | None) -> C:
    """The configuration with micro-batches of learners in place of those that nobody set: those of the resumed run, if
    the machines can give them, or the largest that fit. A resumed run that has none keeps the default."""
    paths = unset_micro_batches(config)
    kept = {path: former[path] for path in paths if path in former} if former is not None else None
    if not paths or kept == {}:
        return config
    nodes = _machines(config)
    if kept and _can_give(found := with_derived(config, kept), nodes):
        return found
    machines = machines_of(nodes)
    why = "no GPU of a known kind was found" if machines is None else ""
    found = config
    if machines is not None:
        try:
            found = derive_gpu_settings(config, nodes, partial(shape_of, fetch=config_from_hub))
            why = f"the largest that fit {machines.gpus} x {machines.device.name}" if found is not config else ""
        except ModelError as error:
            why = str(error)
    if why:
        values = ", ".join(f"{path}={value_at(found, path)}" for path in paths)
        logging.getLogger(__name__).warning(f"{values}, which nobody set: {why}")
    return found


def _former_settings(config: StageConfig) -> dict[str, Any] | None:
    """The derived values in config.yaml of the run that is resumed, of fields that this configuration has too; None
    without such a run."""
    text = former_config(config)
    if text is None:
        return None
    try:
        values = yaml.safe_load(text)
        if not values.get("cluster", {}).get("derived"):
            return {}
        former = type(config).model_validate(values)
    except (yaml.YAMLError, AttributeError, TypeError, ValidationError) as error:
        raise ConfigError(f"config.yaml of the run in {config.run.dir} cannot be read: {error}; restore it, or set "
                          "pools, and the workers and gpus of roles") from None
    found = {}
    for path in former.cluster.derived:
        with suppress(LookupError):
            value_at(config, path)
            found[path] = value_at(former, path)
    return found


def former_config(config: StageConfig) -> str | None:
    """The text of config.yaml of the run that is resumed; None without such a run. Another machine may have made it,
    and uploaded it."""
    file = RunDirectory(config.run.dir).config
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        found = RemoteDirectory(config.run.upload).read(file.name) if config.run.upload else None
    except Exception:  # whatever that library raises; `fetch_uploaded` reports it
        found = None
    return None if found is None else found.decode()


def _machines(config: StageConfig) -> list[Node]:
    """The nodes of the cluster that the run joins, or this machine with all its memory. vLLM's build for CPUs uses no
    GPU."""
    if config.cluster.address is not None:
        return nodes_of_cluster(config.cluster)
    import psutil

    node = this_machine(list(config.pools.values()), float(psutil.virtual_memory().total))
    engines = installed_engines()
    if CPU_ENGINE in engines and GPU_ENGINE not in engines:
        return [replace(node, gpu=None, resources={**node.resources, "GPU": 0.0})]
    return [node]


def _can_give(config: StageConfig, nodes: Sequence[Node]) -> bool:
    """Whether nodes can give the settings that were derived for others."""
    try:
        return fits(checked(config), [_with_margin(node) for node in nodes], partial(shape_of, fetch=config_from_hub))
    except ConfigError:
        return False
    except ModelError:
        return True


MARGIN = 1.15
"""Estimates may be off by this factor (docs/plan.md); a run within the margin is tried."""


def check_fit(config: StageConfig) -> None:
    """Refuse a run that needs more memory than this machine has. Skipped for a cluster that is joined later, whose
    nodes are not known yet, and for models of unknown shape.

    Raises:
        ConfigError: what would not fit, and the fields to change.
    """
    if config.cluster.address is not None:
        return
    import psutil

    node = this_machine(list(config.pools.values()), psutil.virtual_memory().total)
    if any(pool.gpus for pool in config.pools.values()) and node.gpu is None:
        return  # the missing GPU is reported when pools are placed
    try:
        require_fit(config, [node])
    except ModelError:  # a model on the Hub, or of a shape unknown to planning: it may fit
        return


def require_fit(config: StageConfig, nodes: Sequence[Node]) -> None:
    """Refuse a run that cannot work on these nodes.

    Raises:
        ConfigError: what would not fit, and the fields to change.
        ModelError: the shape of a model is unknown.
    """
    refused = make_plan(config, [_with_margin(node) for node in nodes], shape_of).refused
    if refused:
        raise ConfigError("the run does not fit its machines:\n" + "\n".join(f"  {text}" for text in refused)
                          + f"\n  (their memory is taken as {MARGIN - 1:.0%} larger than it is, because estimates err; "
                          "`rlhf-ray plan` shows the whole plan, with the fields to change)")


def _with_margin(node: Node) -> Node:
    gpu = replace(node.gpu, memory_bytes=MARGIN * node.gpu.memory_bytes) if node.gpu else None
    return replace(node, memory_bytes=MARGIN * node.memory_bytes, gpu=gpu)


def check_resume(config: StageConfig, steps: int, geometry: Geometry | None = None) -> None:
    """Refuse a resume to fewer steps than were made, or with another geometry than the run has.

    Reads only names and small files of the run's directory. The newest checkpoint's bytes are verified later, and if
    they are damaged, an older checkpoint is used.

    Args:
        steps: all steps that the run is to make.
        geometry: as for `Recovery`.

    Raises:
        ConfigError: more steps were made than `steps`, or the checkpoint has another geometry.
    """
    newest = CheckpointStore(RunDirectory(config.run.dir).checkpoints, keep=1).newest_name()
    if newest is None:
        return
    step, path = newest
    if step > steps:
        raise ConfigError(f"run.steps={steps}: the run in {config.run.dir} has made {step} steps already; set "
                          f"run.steps to {step} or more, or start a new run in another run.dir")
    saved = None
    with suppress(CheckpointError):  # a damaged one is reported when its bytes are verified
        saved = load_state(path / "coordinator.json").get("geometry")
    if geometry and isinstance(saved, dict):
        check_geometry(path, geometry, saved)
