"""What accompanies a run that is submitted to a cluster: checks beforehand, its job id, its metadata and variables."""

import getpass
import hashlib
import importlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

import yaml

from rlhf_ray.checkpoint.remote import require_no_password
from rlhf_ray.cluster.jobs.package import exists_here
from rlhf_ray.config.config_layers import environment_of
from rlhf_ray.config.fields import strings_of
from rlhf_ray.config.load import module_of
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.errors import ConfigError, ModelError, first_line
from rlhf_ray.models.hub import config_from_hub
from rlhf_ray.planning.gpu_settings import derive_gpu_settings, machine_fields, machines_of
from rlhf_ray.planning.model_lookup import shape_of
from rlhf_ray.planning.node_spec import Node
from rlhf_ray.stages.preflight import require_fit

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's variable for the time between the request to stop a job and its kill; Ray's default of 3 s is too short for a
checkpoint."""


def check_before_submission(stage: str, config: StageConfig) -> list[str]:
    """Run the stage's preflight here, as far as this machine sees the files that the run reads.

    Returns:
        notices for the user.

    Raises:
        RLHFError: as raised by the stage's own preflight.
    """
    if config.run.upload:
        require_no_password(config.run.upload)
    unseen = sorted({text for _, text in strings_of(config) if text.startswith("/") and not exists_here(Path(text))}
                    - {config.run.dir})
    if unseen:
        return [f"not visible from here, so the job will check it when it starts: {', '.join(unseen)}"]
    importlib.import_module(f"rlhf_ray.stages.{module_of(stage)}").preflight(config)
    return []


def check_plan(config: StageConfig, nodes: Sequence[Node], where: str) -> list[str]:
    """Refuse a run that the cluster's present nodes cannot hold.

    Returns:
        notices for the user.

    Raises:
        ConfigError: what does not fit, and the fields to change.
    """
    unknown = [node.name for node in nodes if node.gpus and node.gpu is None]
    if unknown and any(pool.gpus for pool in config.pools.values()):
        return [f"no plan was made for the cluster: {unknown[0]} has GPUs of an unknown kind"]
    try:
        config = derive_gpu_settings(config, nodes, partial(shape_of, fetch=config_from_hub))
        require_fit(config, nodes)
    except ModelError as error:
        return [f"no plan was made for the cluster: {first_line(error)}"]
    except ConfigError as error:
        raise ConfigError(f"{error}\n  (the nodes of {where}; use --no-plan if an autoscaler adds others)") from None
    derived = machine_fields(config)
    machines = machines_of(nodes)
    if "pools" in derived and machines is not None:
        return [f"it fits the {len(nodes)} node(s) of {where}; the job derives settings for {machines.gpus} x "
                f"{machines.device.name}: {', '.join(derived)}"]
    return [f"it fits the {len(nodes)} node(s) of {where}"]


def about_run(stage: str, config: StageConfig, directory: Path, arguments: Sequence[str]) -> dict[str, str]:
    """The metadata that the cluster keeps with the job, for its dashboard and for `rlhf-ray jobs`."""
    return {
        "run": Path(config.run.dir).name, "stage": stage, "dir": config.run.dir, "commit": git_commit(directory),
        "config": digest(config), "by": _user(), "arguments": json.dumps(list(arguments)),
        "stop_wait_s": str(stop_wait_s(config)),
    }


def digest(config: StageConfig) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the resolved configuration: equal ones have equal digests."""
    return hashlib.sha256(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:12]


def git_commit(directory: Path) -> str:
    """The commit of a directory's checkout, followed by "+" when files differ from it; "" outside of git."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=20,
                              check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + "+" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""


def new_job_id(config: StageConfig) -> str:
    """A unique job id that begins with the run's name."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', Path(config.run.dir).name)[:40] or 'run'}-{uuid4().hex[:8]}"


def stop_wait_s(config: StageConfig) -> int:
    """Seconds between a stop request and a kill, for the update and the checkpoint in progress: the deadline of a
    call."""
    return int(config.cluster.call_timeout_s)


def variables_of(config: StageConfig, requested: Mapping[str, str]) -> dict[str, str]:
    """Variables of the job's environment: those of this process that are part of the configuration, and the requested
    ones."""
    of_configuration = {name: os.environ[name] for name in environment_of(type(config))}
    return {**of_configuration, **requested, STOP_WAIT: str(stop_wait_s(config))}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
