"""Arguments that `rlhf-ray generate` and `compare` share: a model by its name, and an output file."""

import tempfile
from pathlib import Path
from typing import Literal

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.models.loading import check_model_directory
from rlhf_ray.observability.run_directory import RunDirectory


def check_output(path: Path) -> None:
    """Make the folder of `path`, and check that files can be written in it.

    Raises:
        ConfigError: they cannot, or `path` is a folder.
    """
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror or error}; name a file in a "
                          "writable folder") from error


def model_at(name: str, argument: str = "MODEL",
             dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> tuple[ModelConfig, str | None]:
    """The model called `name` (a directory, a Hub id, or the run that made it), and a notice when a run's directory
    stands for its model/, or for what `rlhf-ray export` wrote.

    Args:
        argument: the command-line argument with the name, for messages.
        dtype: "auto" is bfloat16 on a GPU and float32 without one.

    Raises:
        ModelError: the model does not exist.
    """
    run, notice = RunDirectory(name), None
    path = name
    if run.model.is_dir() and not (run.path / "config.json").is_file():
        path, notice = str(run.model), f"{name} is a run; using its model, {run.model}"
        if run.best.is_dir():
            notice += f" (its best step is in {run.best})"
    elif exported := run.newest_export():
        path, notice = str(exported), f"{name} is a run without a model/; using its export, {exported}"
    config = ModelConfig(path=path, dtype=_on_this_machine() if dtype == "auto" else dtype)
    check_model_directory(config, argument, argument=True)
    return config, notice


def _on_this_machine() -> Literal["float32", "bfloat16"]:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"
