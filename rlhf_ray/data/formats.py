"""Which reader of rows belongs to which section of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf_ray.config.data import (
    DataSection,
    DemonstrationsConfig,
    PreferencesConfig,
    ProcessRowsConfig,
    PromptsConfig,
    StepsConfig,
)
from rlhf_ray.data.demonstrations import DemonstrationFormat, load_demonstrations
from rlhf_ray.data.faults import Faults
from rlhf_ray.data.preferences import PreferenceFormat, load_preferences
from rlhf_ray.data.process_rows import StepFormat, load_process_rows
from rlhf_ray.data.prompts import prompt_format, stream_prompts
from rlhf_ray.data.reading import section_rows
from rlhf_ray.data.report import LoadReport
from rlhf_ray.data.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def row_reader(
    config: DataSection, tokenizer: PreTrainedTokenizerBase, steps: StepsConfig | None = None
) -> Callable[[Rows, int], Any]:
    """What reads a row of a section that is no mix, and raises what is wrong with it.

    Args:
        steps: how steps are written, for process-labelled rows.
    """
    if isinstance(config, PromptsConfig):
        return prompt_format(config, tokenizer).read
    if isinstance(config, DemonstrationsConfig):
        return DemonstrationFormat(config, tokenizer).read
    if isinstance(config, PreferencesConfig):
        return PreferenceFormat(config, tokenizer).read
    if isinstance(config, ProcessRowsConfig) and steps:
        return StepFormat(config, steps, tokenizer).read
    raise TypeError(f"{type(config).__name__} has no reader of its own")


def check_rows(config: DataSection, tokenizer: PreTrainedTokenizerBase, steps: StepsConfig | None = None) -> int:
    """Read the rows of a section that is no mix, without tokenising them, and count them.

    Raises:
        DataError, ModelError: rows cannot be used; names them.
    """
    faults, read = Faults(), row_reader(config, tokenizer, steps)
    found = 0
    for rows in section_rows(config, faults):
        faults.values(rows, read)
        found += len(rows)
    faults.check()
    return found


def check_some_are_left(config: DataSection, tokenizer: PreTrainedTokenizerBase,
                        steps: StepsConfig | None = None) -> None:
    """Load a small section that is no mix, to see that not all of its rows are left out.

    Raises:
        DataError, ModelError: no row is left (says why each was left out), or not enough to hold some out.
    """
    if isinstance(config, PromptsConfig):
        for _ in stream_prompts(config, tokenizer, LoadReport(config.location)):
            pass
    elif isinstance(config, DemonstrationsConfig):
        load_demonstrations(config, tokenizer)
    elif isinstance(config, PreferencesConfig):
        load_preferences(config, tokenizer)
    elif isinstance(config, ProcessRowsConfig) and steps:
        load_process_rows(config, steps, tokenizer)
