"""Ledgers written by hand: prompts are admitted as a data cursor would hand them out."""

from collections import Counter

from rlhf_ray.replay.ledger_tables import LedgerFacts

FACTS = LedgerFacts(samples_per_step=4, samples_per_prompt=2, max_staleness=1, source_rows=(3,), seed=0, shuffle=True,
                    weights=(1.0,))


def begin(ledger, keys, version=0):
    """Admit new samples and lease them; the position moves on by their prompts, source by source."""
    facts = LedgerFacts.read(ledger._db)
    ends = [sum(facts.source_rows[: n + 1]) for n in range(len(facts.source_rows))]
    drawn = Counter(sum(row >= end for end in ends) for _, row in {(key.epoch, key.row) for key in keys})
    before = dict(ledger._db.execute("SELECT source, handed_out FROM cursor"))
    ledger.admit(keys, [before[source] + drawn[source] for source in before])
    ledger.start_attempt(keys, version)
