"""Reduces the log output of other libraries. Called before a command, never on import."""

import os
import warnings

LEVELS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",  # forking after a parallel tokenizer call warns and may deadlock
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; unset, every start prints a FutureWarning
}
"""Environment variables that set the log level of a library."""
_NOISY = ("transformers", "vllm", "deepspeed", "torch", "datasets", "ray", "huggingface_hub", "pydantic")


def quiet_libraries() -> None:
    """Reduce other libraries' output to errors and important warnings, in this process and its children.

    A level that the user has set in the environment is kept. Our own warnings stay visible.
    """
    for variable, value in LEVELS.items():
        os.environ.setdefault(variable, value)
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        for library in _NOISY:
            warnings.filterwarnings("ignore", category=category, module=rf"{library}(\..*)?$")
