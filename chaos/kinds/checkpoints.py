"""Damage to the newest checkpoint while no driver runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from chaos.checkpoint_damage import damage
from chaos.evidence import Evidence, Outcome
from chaos.faults import Fault
from chaos.kind import Kind, judged
from chaos.run_record import RunRecord
from rlhf_ray.observability.run_directory import RunDirectory

SKIPPED = "skipping a damaged checkpoint"


@dataclass(frozen=True, kw_only=True)
class CheckpointDamage(Kind):
    """One file of the newest checkpoint is damaged."""

    victim: str = "newest checkpoint"
    state: str = "before a resume"

    colour: ClassVar[str] = "checkpoint"
    follows_an_end: ClassVar[bool] = True
    needs_no_driver: ClassVar[bool] = True
    checkpoints: ClassVar[int] = 2

    def inject_between(self, record: RunRecord, fault: Fault) -> str | None:
        """Damage it."""
        return damage(fault, RunDirectory(record.directory).checkpoints)

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The next driver must report it."""
        after = next((start for start in evidence.record.starts if start.began > injection["time"]), None)
        passed_over = after is not None and SKIPPED in after.log.read_text(errors="replace")
        return judged(evidence, fault, injection, "" if passed_over else "the damaged checkpoint was not passed over")


KINDS = (
    CheckpointDamage(name="checkpoint_flip", mechanism="bit flipped", runs={"synchronous": 1, "overlapped": 1},
                     words="a bit of the newest checkpoint is flipped before --resume"),
    CheckpointDamage(name="checkpoint_truncate", mechanism="cut short",
                     words="a file of the newest checkpoint is cut short before --resume"),
    CheckpointDamage(name="checkpoint_delete", mechanism="deleted",
                     words="a file of the newest checkpoint is deleted before --resume"),
)
"""Kinds of this module."""
