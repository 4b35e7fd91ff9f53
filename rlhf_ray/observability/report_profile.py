"""The report's part on profiles: when each worker worked in a profiled step, what it computed, and its traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_ray.errors import DataError
from rlhf_ray.observability.chart_specs import ROLE_COLOURS
from rlhf_ray.observability.metric_catalogue import readable
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import Lane

SHOWN = 8
"""Operators of each worker in the report; profile.json has more."""


def profiles(run: RunDirectory) -> list[dict[str, Any]]:
    """All profiles of a run, newest step first, for profiles.html.

    Raises:
        DataError: a profile is damaged.
    """
    found = []
    for path in sorted(run.profile.glob("step_*/profile.json"), key=lambda path: -int(path.parent.name.split("_")[1])):
        try:
            found.append(_profile(json.loads(path.read_text()), f"profile/{path.parent.name}"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error!r}. Remove its directory, then make the report again"
                            ) from error
    return found


def _profile(profile: Mapping[str, Any], place: str) -> dict[str, Any]:
    workers = [{
        "name": name, "trace": worker["trace"], "seconds": float(worker["seconds"]),
        "most": max((operator["own_ms"] for operator in worker["operators"]), default=0.0),
        "operators": [(operator["name"], int(operator["calls"]), float(operator["own_ms"]))
                      for operator in worker["operators"][:SHOWN]],
    } for name, worker in sorted(profile["workers"].items())]
    return {"step": int(profile["step"]), "seconds": float(profile["seconds"]), "place": place, "workers": workers,
            "lanes": lanes_by_worker(profile["spans"])}


def lanes_by_worker(lanes: Sequence[Lane]) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Title, colour and calls (start and end in seconds) of each worker: roles in the order in which they begin to
    work, ranks of a role together."""
    roles = list(dict.fromkeys(lane[0].split("/")[0] for lane in lanes))
    workers = sorted({(roles.index(role), role, int(rank)) for role, rank in (lane[0].split("/") for lane in lanes)})
    return [(f"{readable(role)} {rank}", ROLE_COLOURS.get(role, "assembler"),
             [(float(start), float(end)) for name, start, end in lanes if name == f"{role}/{rank}"])
            for _, role, rank in workers]
