"""Which tensors of a checkpoint a generator keeps in one layer, so that they can only be replaced together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

EXPERTS = ".experts."
"""Mixtures keep all experts of a layer in one."""


def fused_groups(names: Iterable[str], fused: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Names that share a layer with others, a list for each such layer.

    Args:
        names: of a checkpoint's tensors, such as "model.layers.0.self_attn.q_proj.weight".
        fused: parts of each fused layer, such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}; vLLM's models carry it
            as `packed_modules_mapping`.
    """
    whole = {part: layer for layer, parts in fused.items() for part in parts}
    groups: dict[str, list[str]] = {}
    for name in names:
        module = name.partition(EXPERTS)[0] if EXPERTS in name else name.rpartition(".")[0]
        layer = ".".join(whole.get(part, part) for part in module.split("."))
        groups.setdefault(layer, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def expand_fused_groups(changing: Iterable[str], groups: Iterable[Sequence[str]]) -> set[str]:
    """`changing`, and what shares a layer with one of them."""
    found = set(changing)
    return found.union(*(group for group in groups if found.intersection(group)))
