"""What can be told of a resume before anything is started, from the names and small files of the run's directory.

Its newest checkpoint's bytes are verified later, and if they are damaged another one is taken: nothing here is final,
but what is refused here could not go on.
"""

from collections.abc import Mapping
from contextlib import suppress

from rlhf_ray.checkpoint.directory import CheckpointStore
from rlhf_ray.checkpoint.state import load_state
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.coordinator.recovery import check_geometry
from rlhf_ray.errors import CheckpointError, ConfigError
from rlhf_ray.observability.run_directory import RunDirectory


def check_resume(config: StageConfig, steps: int, geometry: Mapping[str, int | str] | None = None) -> None:
    """Refuse a resume that asks for less than was done, or for another geometry than the run has.

    Args:
        steps: all steps that the run is to make.
        geometry: as for `Recovery`.

    Raises:
        ConfigError: more steps were made than are asked for, or the checkpoint is of another geometry.
    """
    newest = CheckpointStore(RunDirectory(config.run.dir).checkpoints, keep=1).newest_name()
    if newest is None:
        return
    step, path = newest
    if step > steps:
        raise ConfigError(f"run.steps={steps}: the run in {config.run.dir} has made {step} steps already; set "
                          f"run.steps to {step} or more, or begin a new run in another run.dir")
    saved = None
    with suppress(CheckpointError):  # one that is damaged is told of when its bytes are verified
        saved = load_state(path / "coordinator.json").get("geometry")
    if geometry and saved:
        check_geometry(path, geometry, saved)
