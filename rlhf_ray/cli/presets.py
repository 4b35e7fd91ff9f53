"""`rlhf-ray presets`: the recipes that `algorithm.preset` fills in, with the source of each value."""

from typing import Annotated, Any

import typer

from rlhf_ray.errors import ConfigError


def presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A preset; without it, all are listed.")] = None,
) -> None:
    """List the presets of `algorithm.preset`, or print one as YAML.

    A preset fills in what nobody sets. Its YAML has the source of each value beside it, and can be pasted into the file
    of a run to change it.
    """
    from rlhf_ray.config.error_messages import suggestion
    from rlhf_ray.config.presets import PRESETS

    if name is None:
        width = max(map(len, PRESETS))
        for each, preset in PRESETS.items():
            print(f"{each:{width}}  {preset.sentence}")
        print("\n`rlhf-ray presets NAME` prints one as YAML; `--algorithm.preset=NAME` uses it.")
        return
    found = name.lower().replace("-", "_")
    if found not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; {suggestion(found, list(PRESETS))}")
    print(preset_yaml(found), end="")


def preset_yaml(name: str) -> str:
    """A preset as YAML with the source of each value as a comment."""
    from rlhf_ray.config.generation import SamplingConfig
    from rlhf_ray.config.presets import PRESETS, ShareOf

    preset = PRESETS[name]
    tree: dict[str, Any] = {}
    for path, (value, source) in preset.values.items():
        *above, last = path.split(".")
        section = tree
        for key in above:
            section = section.setdefault(key, {})
        if isinstance(value, ShareOf):
            whole = SamplingConfig.model_fields["max_tokens"].default
            value, source = value.of(whole), f"with max_tokens={whole}; {source}"
        section[last] = (value, source)
    return "\n".join([f"# {preset.sentence}", *_lines(tree, ""), ""])


def _lines(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, node in tree.items():
        if isinstance(node, dict) and node.keys() == {"type"}:  # the short form
            node = node["type"]
        if isinstance(node, dict):
            lines += [f"{indent}{key}:", *_lines(node, indent + "  ")]
        else:
            value, source = node
            lines.append(f"{indent}{key}: {value}  # {source}")
    return lines
