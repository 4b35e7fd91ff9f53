"""The outcome of each fault of a run: whether its victim was in the required state, was hit, and whether the run
survived it. What counts as evidence is defined by its kind.
"""

from __future__ import annotations

from dataclasses import replace

from chaos.evidence import EARLY_S, Evidence, Outcome
from chaos.kinds import kind_of
from chaos.run_record import RunRecord


def outcomes(record: RunRecord) -> list[Outcome]:
    """The outcome of every fault of the plan, in its order."""
    injected = {line["fault"]: line for line in record.injections.read("injected")}
    evidence, found = Evidence(record), dict[int, Outcome]()
    for fault in sorted(record.faults, key=lambda fault: not kind_of(fault).exact_event):
        if (injection := injected.get(fault.number)) is None:
            found[fault.number] = Outcome(record.config.stem, fault, "", problem="its required state was never reached",
                                          injected=False)
        elif kind_of(fault).went_unnoticed(evidence, injection):
            found[fault.number] = Outcome(record.config.stem, fault, injection["state"], injected=False,
                                          problem="the driver ended before it could notice")
        else:
            found[fault.number] = kind_of(fault).outcome(evidence, fault, injection)
    inorder = [found[fault.number] for fault in record.faults]
    return [_if_over(record, outcome) for outcome in inorder] if record.interruption else inorder


def unnoticed(record: RunRecord) -> set[int]:
    """Numbers of the faults whose victims were lost unnoticed, because the driver ended; see
    `Kind.went_unnoticed`."""
    last, evidence = {line["fault"]: line for line in record.injections.read("injected")}, Evidence(record)
    return {fault.number for fault in record.faults if fault.number in last
            and kind_of(fault).went_unnoticed(evidence, last[fault.number])}


def to_inject_again(record: RunRecord) -> set[int]:
    """Numbers of the faults that went unnoticed, and of those that such faults need directly before them: without a
    generator that is killed, for example, there is no catch-up in which another one could be hit."""
    lost = unnoticed(record)
    pairs = zip(record.faults, record.faults[1:], strict=False)
    return lost | {before.number for before, fault in pairs
                   if fault.number in lost and kind_of(fault).preceded_by == before.kind}


def _if_over(record: RunRecord, outcome: Outcome) -> Outcome:
    """For a run that was interrupted: a fault that it had not survived by then does not count."""
    if outcome.recovery_s is not None and not outcome.problem:
        return outcome
    last = record.starts[-1].began
    logged = next((line for line in record.injections.read("injected") if line["fault"] == outcome.fault.number), None)
    if logged is not None and logged["time"] < last - EARLY_S and not outcome.problem:
        return outcome
    return replace(outcome, injected=False, problem="the run was interrupted before it recovered")
