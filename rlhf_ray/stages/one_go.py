"""The life of a stage without checkpoints: it finishes, or begins again."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlhf_ray.config.stages import StageConfig
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.start_phases import START
from rlhf_ray.stages.preflight import with_gpu_settings
from rlhf_ray.stages.runtime import owned_directory, run_stage

C = TypeVar("C", bound=StageConfig)


def run_in_one_go(
    config: C, resume: bool, preflight: Callable[[C], None],
    main: Callable[[C, RunDirectory], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any]:
    """Check a configuration and run the stage; returns the summary. When resuming, that of a finished run is kept.

    Args:
        main: does the stage's work in its directory.

    Raises:
        RLHFError: as `preflight`, `owned_directory` and `run_stage`.
    """
    config = with_gpu_settings(config, resume)
    START.begin("checks", "checking the configuration, models and data")
    preflight(config)
    if resume and (finished := read_json(RunDirectory(config.run.dir).summary)):
        return finished
    with owned_directory(config, resume) as directory:
        return run_stage(config, directory, resume, lambda _: main(config, directory))
