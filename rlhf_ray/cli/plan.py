"""`rlhf-ray plan`: what a run would take, before it is paid for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_ray.cli.paths import local_path, path_or_name
from rlhf_ray.cli.stage import Arguments, Stage, may_have_gpus, split_arguments
from rlhf_ray.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_ray.config.stages import StageConfig
    from rlhf_ray.planning.node_spec import Node
    from rlhf_ray.planning.plan import Plan
    from rlhf_ray.planning.roles import Shapes

NodesOption = Annotated[str | None, typer.Option(
    "--nodes", metavar="SPEC", help="Machines to plan for: 2x8xH100, 4x(gpus=8,cpus=64,label=a:b), joined by +.")]
ClusterOption = Annotated[str | None, typer.Option(
    "--cluster", metavar="ADDRESS", help="Plan for the nodes of this running Ray cluster.")]
ShapeOption = Annotated[list[str] | None, typer.Option(
    "--shape", metavar="MODEL=LIKE", help="MODEL has the shape of LIKE: a known name, or a config.json's directory.")]
WriteOption = Annotated[Path | None, typer.Option(
    "--write", parser=local_path, metavar="FILE", help="Write the configuration with the values that were derived from "
    "the machines' GPUs; in FILE they are yours to change.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]


def plan(
    arguments: Arguments = None, nodes: NodesOption = None, cluster: ClusterOption = None, stage: Stage = None,
    shape: ShapeOption = None, write: WriteOption = None, json: JsonOption = False,
) -> None:
    """Show where each role of a run would lie, the memory of every device, the batch, the disk and a step's time.

    Needs no GPU, starts nothing, reads no data and loads no weights. Ends with 2 when the run could not work, and says
    what to change.
    """
    import sys

    from rlhf_ray.planning.node_spec import parse_nodes

    if not arguments:
        raise ConfigError("give a configuration file: rlhf-ray plan CONFIG [--nodes 2x8xH100]")
    if nodes and cluster:
        raise ConfigError("--nodes describes machines and --cluster asks running ones; give one of them")
    path, overrides = split_arguments(arguments)
    described = parse_nodes(nodes) if nodes else []
    config = load_any(path, overrides, stage,
                      (lambda _: any(node.gpus for node in described)) if nodes else may_have_gpus)
    config = for_machines(config, described or machines(config, cluster, free=False), shape or [])
    made = plan_for(config, described or machines(config, cluster), shape or [], measure_disk=not nodes)
    if write:
        write_configuration(config, write)
    if json:
        from rlhf_ray.cli.plan_report import plan_as_json

        print(plan_as_json(made))
    else:
        from rich.console import Console

        from rlhf_ray.cli.plan_report import plan_page
        from rlhf_ray.config.settled import is_set

        console = Console(highlight=False)
        console.print(plan_page(made, console.width))
        wanted = any(pool.gpus for pool in config.pools.values()) or not is_set(config, "pools")
        if wanted and not (nodes or cluster or config.cluster.address or made.nodes[0].gpus):
            console.print("this machine has no GPU; plan for one that has with, say, --nodes 1x8xH100", soft_wrap=True)
    if made.refused:
        sys.exit(ConfigError.exit_code)


def load_any(path: Path | None, overrides: list[str], stage: str | None,
             has_gpus: Callable[[str | None], bool] = lambda _: True) -> StageConfig:
    """The configuration, of the stage that is named or that the file's sections tell.

    Raises:
        ConfigError: as `config.load.load`, and for a stage there is not.
    """
    from rlhf_ray.config.config_layers import merge, read_overrides, read_yaml
    from rlhf_ray.config.load import COMMANDS, load
    from rlhf_ray.config.stages import PPOConfig

    layers = [*([read_yaml(path)] if path else []), read_overrides(overrides, PPOConfig)]
    named = stage or stage_of_file(merge(PPOConfig, layers), path)
    if named not in COMMANDS:
        raise ConfigError(f"--stage={named}: there is no such stage; there are {', '.join(COMMANDS)}")
    return load(COMMANDS[named], path, overrides, has_gpus=has_gpus)


def stage_of_file(values: object, path: Path | None) -> str:
    """Whose configuration a file is, by the sections that one stage alone has; else by its name; else sft. One with
    rewards or environments and with neither `algorithm.estimator` nor `algorithm.preset` is for the command in its
    name, such as grpo; else for ppo."""
    sections = values if isinstance(values, dict) else {}
    algorithm = sections.get("algorithm") or {}
    rewarded = {"rewards", "environments"} & sections.keys()
    if rewarded and path and isinstance(algorithm, dict) and {"estimator", "preset"}.isdisjoint(algorithm):
        named = {"grpo", "rloo", "reinforce"}.intersection(re.split(r"[^a-z0-9]+", path.stem.lower()))
        if len(named) == 1:
            return named.pop()
    for section, stage in (("rewards", "ppo"), ("environments", "ppo"), ("pairs", "preferences"),
                           ("steps", "process-reward"), ("prompts", "preferences")):
        if section in sections:
            return stage
    data, training = sections.get("data") or {}, sections.get("training") or {}
    compares = {"chosen", "rejected", "margin"} & set(data) or "head_dropout" in training
    return "reward-model" if compares or (path and "reward" in path.stem) else "sft"


def machines(config: StageConfig, cluster: str | None, free: bool = True) -> list[Node]:
    """The nodes of a running cluster, or this machine with its free memory (or with all of it).

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    address = cluster or config.cluster.address
    if address:
        from rlhf_ray.cluster.nodes import nodes_of_cluster

        return nodes_of_cluster(config.cluster.model_copy(update={"address": address}))
    import psutil

    from rlhf_ray.planning.local_machine import this_machine

    memory = psutil.virtual_memory()
    return [this_machine(list(config.pools.values()), float(memory.available if free else memory.total))]


def for_machines(config: StageConfig, nodes: list[Node], like: list[str]) -> StageConfig:
    """The configuration with settings for the GPUs of these nodes in place of those that nobody made.

    Raises:
        ConfigError: no layout goes with what is set.
        ModelError: the shape of a model is not known.
    """
    from rlhf_ray.planning.gpu_settings import checked, derive_gpu_settings

    derived = derive_gpu_settings(config, nodes, shapes_of(like))
    return checked(derived) if "pools" in derived.cluster.derived else derived


def write_configuration(config: StageConfig, file: Path) -> None:
    """Write a configuration whose values are all somebody's own.

    Raises:
        ConfigError: the file cannot be written.
    """
    from rlhf_ray.config.load import as_yaml
    from rlhf_ray.config.settled import with_settled

    try:
        file.write_text(as_yaml(with_settled(config, {"cluster.derived": []})), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {file} cannot be written: {error.strerror or error}; name a file in a writable "
                          "folder") from error


def shapes_of(like: list[str]) -> Shapes:
    """Shapes of models from directories, the table, the Hub, or those that `like` says (MODEL=LIKE)."""
    from rlhf_ray.config.model import ModelConfig, NewModelConfig
    from rlhf_ray.models.hub import config_from_hub
    from rlhf_ray.planning.model_lookup import shape_of
    from rlhf_ray.planning.model_shape import ModelShape

    pairs = dict(_pair(text) for text in like)

    def shapes(model: ModelConfig | NewModelConfig, field: str) -> ModelShape:
        named = model.path if isinstance(model, ModelConfig) else ""
        if isinstance(model, ModelConfig) and named in pairs:
            model = model.model_copy(update={"path": pairs[named]})
        return shape_of(model, field, config_from_hub)

    return shapes


def plan_for(config: StageConfig, nodes: list[Node], like: list[str], measure_disk: bool = False) -> Plan:
    """The plan; `like` as in `shapes_of`."""
    from rlhf_ray.checkpoint.disk_space import free_bytes
    from rlhf_ray.planning.plan import make_plan

    free = float(free_bytes(Path(config.run.dir))) if measure_disk else None
    return make_plan(config, nodes, shapes_of(like), free)


def _pair(text: str) -> tuple[str, str]:
    model, equals, like = text.partition("=")
    if not equals or not like:
        raise ConfigError(f"--shape {text!r}: write MODEL=LIKE, such as --shape my-models/base=Qwen/Qwen2.5-7B")
    return model, path_or_name(like)
