"""Writes `docs/configuration.md` from the models: every stage, section and field. `make docs` calls it."""

import sys
from pathlib import Path

from rlhf_ray.config.fields import FieldDescription, describe_fields
from rlhf_ray.config.load import STAGES
from rlhf_ray.config.stages import StageConfig

_OPENING = """\
# Configuration

Written by `make docs` from the models in `rlhf_ray/config/`; do not edit.

A stage reads one YAML file, in which every section below is a mapping of its fields:

```yaml
run:
  dir: runs/mine
  steps: 200
policy:
  optimizer:
    learning_rate: 1.0e-5
```

Values come from four places; each wins over those after it:

1. the command line: `--policy.optimizer.learning_rate=1e-5` (or with a space instead of `=`);
2. the environment: `RLHF_RAY_POLICY__OPTIMIZER__LEARNING_RATE=1e-5`;
3. the file;
4. the defaults below.

On the command line and in the environment, lists, mappings and texts in double quotes are written as in YAML,
`[0.9, 0.95]` or `"\\n"`, and `null` (or nothing) stands for empty. Unknown keys, wrong types and combinations that
cannot work are refused before anything starts. Relative paths are relative to the working directory of the command,
whichever file they stand in. The whole configuration as it was used, with every derived value filled in, is saved as
`config.yaml` in the run's directory.

`rlhf-ray STAGE --help` shows the most used fields, `--help-all` all of them.
"""


def reference() -> str:
    """The page as Markdown. Sections that stages share, field for field, stand in the first of them."""
    parts = [_OPENING]
    seen: dict[tuple[object, ...], str] = {}
    for command, cls in STAGES.items():
        parts.append(f"## `rlhf-ray {command}`\n\n{_sentence(cls)}\n")
        for section in cls.model_fields:
            fields = [f for f in describe_fields(cls) if f.section == section]
            first = seen.setdefault((section, *fields), command)
            parts.append(_section(cls, section, fields, first if first != command else None))
    return "\n".join(parts)


def _sentence(cls: type[StageConfig]) -> str:
    text = " ".join((cls.__doc__ or "").split()).partition(": ")[2]
    return text[:1].upper() + text[1:]


def _section(cls: type[StageConfig], section: str, fields: list[FieldDescription], same_as: str | None) -> str:
    sentence = " ".join((cls.model_fields[section].description or "").split())
    head = f"### `{section}`\n\n{sentence}"
    if same_as:
        return f"{head} As in [`rlhf-ray {same_as}`](#rlhf-ray-{same_as}).\n"
    rows = [_row(f) for f in fields]
    return "\n".join([f"{head}\n", "| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(f: FieldDescription) -> str:
    kind = _cell(f.type + (f", {f.bounds}" if f.bounds else ""))
    default = "**required**" if f.required else f"`{_cell(f.default)}`"
    return f"| `{f.path}` | {kind} | {default} | {_cell(f.sentence)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
