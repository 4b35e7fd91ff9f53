"""`rlhf-ray submit`: a stage as a job of a remote Ray cluster, checked here, run there, followed in this terminal."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_ray.cli.jobs import Address, AllowPlainHTTP
from rlhf_ray.cli.paths import local_path
from rlhf_ray.cli.stage import Arguments, Resume, Stage, split_arguments
from rlhf_ray.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_ray.cluster.jobs.package import Package
    from rlhf_ray.config.stages import StageConfig

Requirements = Annotated[Path | None, typer.Option(
    "--requirements", parser=local_path, metavar="PATH", help="Packages that the cluster's nodes lack, one a line as "
    "for pip; Ray installs them for this job.")]
Variables = Annotated[list[str] | None, typer.Option(
    "--env", help="Name of an environment variable to pass to the job; anyone with the cluster's token can read its "
    "value. Repeat for more.")]
PlanFirst = Annotated[bool, typer.Option(
    "--plan/--no-plan", help="Refuse a run that does not fit on the cluster's present nodes.")]
Follow = Annotated[bool, typer.Option("--follow/--no-follow", help="Show its progress until it ends.")]


def submit(
    arguments: Arguments = None, address: Address = None, stage: Stage = None, resume: Resume = False,
    requirements: Requirements = None, env: Variables = None, plan: PlanFirst = True, follow: Follow = True,
    allow_plain_http: AllowPlainHTTP = False,
) -> None:
    """Run a stage as a job of a Ray cluster, and follow it. Ctrl-C leaves it running; the exit code is the job's.

    The job takes the working directory along, without runs/ and what .gitignore and .rayignore name, and this package.
    """
    if not arguments:
        raise ConfigError("give a configuration file: rlhf-ray submit CONFIG --address http://HOST:8265")
    path, overrides = split_arguments(arguments)
    config, stage = _configuration(stage, path, overrides)
    from rlhf_ray.cli.jobs import follow_job
    from rlhf_ray.cluster.jobs.package import MIB, check_module_names, check_paths, environment_of, list_package
    from rlhf_ray.cluster.jobs.submission_client import connect
    from rlhf_ray.internals.ray import where_the_token_is
    from rlhf_ray.stages.submission_checks import (
        about_run,
        check_before_submission,
        check_plan,
        new_job_id,
        variables_of,
    )

    package = list_package(Path())
    check_paths(config, package)
    check_module_names(package)
    findings = check_before_submission(stage, config)
    server = connect(address, config.cluster.allow_open, allow_plain_http)
    if plan:
        findings += check_plan(config, server.nodes(), server.url)
    typer.echo(f"packing {len(package.files)} files of {package.directory}, {package.nbytes / MIB:.3g} MiB"
               + ("" if package.nbytes < 50 * MIB else f"; the largest: {package.largest()}"))
    for line in findings:
        typer.echo(line)
    kept = _kept(stage, requirements, env, plan, allow_plain_http)
    about = about_run(stage, config, package.directory, [*arguments, *kept])
    job_id = server.submit(
        _entrypoint(stage, path, package, overrides, resume), new_job_id(config),
        environment_of(package, variables_of(config, _values(env or [])), _lines(requirements)), about, typer.echo)
    hint = f"; its dashboard asks for a token: {where_the_token_is()}" if server.protected else ""
    typer.echo(f"submitted {job_id} to {server.url}{hint}")
    if follow:
        raise typer.Exit(follow_job(server, job_id, address))
    typer.echo(f"follow it with: rlhf-ray logs {job_id} --follow")


def _configuration(stage: str | None, path: Path | None, overrides: list[str]) -> tuple["StageConfig", str]:
    """The configuration, if a job of a cluster may have such a one, and its stage."""
    from rlhf_ray.cli.plan import load_any
    from rlhf_ray.config.load import COMMANDS

    if taken := [text for text in overrides if text.startswith("--cluster.address")]:
        raise ConfigError(f"{taken[0]}: a job runs on the cluster that it is submitted to; leave this out and name the "
                          "cluster's job server with --address")
    config = load_any(path, [*overrides, "--cluster.address=auto"], stage)
    _refuse_expanded(config, path, overrides)
    if not Path(config.run.dir).is_absolute():
        raise ConfigError(
            f"run.dir={config.run.dir!r} is relative, so the job would write into its working directory on the "
            "cluster, which is removed with it: give an absolute path that all nodes see, --run.dir=/shared/runs/NAME")
    return config, next(name for name, kind in COMMANDS.items() if type(config) is kind)


def _refuse_expanded(config: "StageConfig", path: Path | None, overrides: list[str]) -> None:
    """Refuse paths with `~` or a variable: the job would expand them again, on another machine as another user.

    Raises:
        ConfigError: naming the field.
    """
    from rlhf_ray.config.config_layers import Layer, read_environment, read_overrides, read_yaml
    from rlhf_ray.config.fields import strings_of
    from rlhf_ray.config.paths import HOME, VARIABLE

    kept = {text for _, text in strings_of(config)}
    stage = type(config)
    layers = (read_yaml(path) if path else Layer({}), read_environment(stage), read_overrides(overrides, stage))
    for field, text in (pair for layer in layers for pair in strings_of(layer.values)):
        if text not in kept and (HOME.match(text) or VARIABLE.search(text)):
            raise ConfigError(f"{field}={text!r} depends on this machine's environment, and the job runs on another "
                              "one: give an absolute path that all nodes of the cluster see")


def _entrypoint(stage: str, path: Path | None, package: "Package", overrides: list[str], resume: bool) -> str:
    """The command line that the cluster runs in the unpacked directory."""
    words = ["python", "-P", "-m", "rlhf_ray.cli.main", stage]
    if path is not None:
        if not package.holds(path):
            raise ConfigError(f"the configuration {path} is not among what is packed of the working directory "
                              f"{package.directory}: move it there, or call this command from where it is")
        words.append(path.resolve().relative_to(package.directory).as_posix())
    return shlex.join([*words, *overrides, "--cluster.address=auto", *(["--resume"] if resume else [])])


def _kept(stage: str, requirements: Path | None, env: list[str] | None, plan: bool,
          allow_plain_http: bool) -> list[str]:
    """The options that the same run needs again when it is resumed."""
    options = [] if stage == "ppo" else [f"--stage={stage}"]
    if requirements:
        options.append(f"--requirements={requirements}")
    return [*options, *(f"--env={name}" for name in env or []), *([] if plan else ["--no-plan"]),
            *(["--allow-plain-http"] if allow_plain_http else [])]


def _values(names: list[str]) -> dict[str, str]:
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(f"--env={missing[0]}: this environment has no such variable")
    return {name: os.environ[name] for name in names}


def _lines(requirements: Path | None) -> list[str]:
    if requirements is None:
        return []
    if not requirements.is_file():
        raise ConfigError(f"--requirements={requirements}: there is no such file")
    lines = [line.split(" #")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
