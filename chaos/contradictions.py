"""Where the witness contradicts a run, or the run's ledger."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.invariants import Books
from chaos.kinds import kind_of
from chaos.run_record import RunRecord
from chaos.witness.testimony import WitnessReport, testify

COUNTED = ("trained", "lost", "duplicated", "quarantined", "filtered")
"""Numbers of samples that the ledger and the witness count apart."""


def testimony_of(record: RunRecord) -> WitnessReport:
    """What the witness says of a run; nothing if it was interrupted."""
    if record.interruption is not None:
        return WitnessReport()
    try:
        return testify(record.config, record.directory, record.journals)
    except (OSError, ValueError, KeyError) as error:
        return WitnessReport(problems=[f"its journals cannot be read: {error!r}"])


def contradictions(record: RunRecord, books: Books, testimony: WitnessReport) -> Iterator[str]:
    """What the witness found, and where the ledger says otherwise."""
    yield from (f"witness: {problem}" for problem in testimony.problems)
    if record.interruption is not None:
        return
    for what in COUNTED:
        counted, seen = getattr(books, what), getattr(testimony, what)
        if seen is not None and counted != seen:
            yield f"the ledger counts {counted} samples as {what}, the witness {seen}"
    if testimony.not_applied and not any(kind_of(fault).changes_results for fault in record.faults):
        yield f"witness: {testimony.not_applied} optimizer steps were not applied, and no fault caused that"
