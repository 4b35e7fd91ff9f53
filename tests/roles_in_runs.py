"""Other classes for the roles of a run."""

from dataclasses import replace

import pytest

from rlhf_ray.workers import role_table


def use_class(patch: pytest.MonkeyPatch, cls: type) -> None:
    """Let runs start this class in place of the role's that it is derived from."""
    rows = tuple(replace(row, cls=cls) if issubclass(cls, row.cls) else row for row in role_table.ROLE_TABLE)
    assert rows != role_table.ROLE_TABLE, f"{cls.__name__} is derived from no role"
    patch.setattr(role_table, "ROLE_TABLE", rows)
