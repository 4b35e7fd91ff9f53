"""A run that does to its ledger what a coordinator does, without the work: it admits, loses, retries, trains, saves."""

import random

from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger


class SimulatedRun:
    """Chunks of one prompt each, in admission order; whatever may happen to them is drawn from `seed`."""

    def __init__(self, place, facts, seed=0, quarantines=0.0):
        """`quarantines`: how likely a prompt is to be quarantined, and as likely to be filtered, where the facts say
        so."""
        self.place, self.facts, self.quarantines = place, facts, quarantines
        self.random = random.Random(seed)
        self.ledger, self.cursor = Ledger.create(place / "ledger.sqlite", facts), self._new_cursor()
        self.step, self.order = 0, 0
        self.chunks = {}
        """Admission number -> [keys, version, state] of what is open."""
        self.save()

    @property
    def path(self):
        return self.ledger.path

    def _new_cursor(self):
        return PromptCursor(self.facts.source_rows, self.facts.seed, self.facts.shuffle, self.facts.weights)

    @property
    def _prompts_per_step(self):
        return self.facts.samples_per_step // self.facts.samples_per_prompt

    def _draw(self):
        (epoch, row), = self.cursor.next(1)
        keys = [SampleKey(epoch, row, sample) for sample in range(self.facts.samples_per_prompt)]
        self.ledger.admit(keys, self.cursor.position)
        return keys

    def _lease(self, order, keys):
        self.ledger.start_attempt(keys, self.step)
        self.chunks[order] = [keys, self.step, "leased"]

    def admit(self):
        while len(self.chunks) < (self.facts.max_staleness + 1) * self._prompts_per_step:
            self.order += 1
            self._lease(self.order, self._draw())

    def move(self):
        """Something happens to one chunk."""
        order = self.random.choice(list(self.chunks))
        keys, version, state = self.chunks[order]
        if state == "leased":
            self.ledger.generated(keys, f"generator/{self.random.randrange(3)}")
            self.chunks[order][2] = "generated"
        elif state == "generated" and self.random.random() < self.quarantines:
            self.ledger.quarantine(keys, "no score")
            self._lease(order, self._draw())
        elif state == "generated" and self.facts.filters and self.random.random() < self.quarantines:
            self.ledger.filter(keys, "equal scores")
            self._lease(order, self._draw())
        elif state == "generated" and (self.random.random() < 0.2 or self._too_old(version)):
            self._again(order, "its worker died, or it is too old")
        elif state == "generated":
            self.ledger.scored(keys, version)
            self.chunks[order][2] = "scored"

    def _too_old(self, version):
        return self.step - version > self.facts.max_staleness

    def _again(self, order, reason):
        self.ledger.give_up(self.chunks[order][0], reason)
        self._lease(order, self.chunks[order][0])

    def train(self):
        """One step, when its batch has come together."""
        while True:
            self.admit()
            ready = [order for order in sorted(self.chunks) if self.chunks[order][2] == "scored"]
            if len(ready) >= self._prompts_per_step:
                break
            self.move()
        self.step += 1
        for order in ready[: self._prompts_per_step]:
            keys, *_ = self.chunks.pop(order)
            self.ledger.consumed(keys, self.step)
        for order, (_, version, state) in list(self.chunks.items()):
            if state == "scored" and self._too_old(version):
                self._again(order, "too old")
        self.admit()

    def save(self):
        self.ledger.save(self.place / "copy.sqlite")
        self.ledger.mark_committed()
        self._saved = self.step, self.order, self.cursor.state_dict(), {o: list(c) for o, c in self.chunks.items()}

    def die(self):
        """And go on from what was saved."""
        self.step, self.order, cursor, chunks = self._saved
        self.ledger = Ledger.resume(self.path, self.place / "copy.sqlite", self.facts)
        self.cursor = self._new_cursor()
        self.cursor.load_state_dict(cursor)
        self.chunks = {order: list(chunk) for order, chunk in chunks.items()}
        for order, (keys, _, state) in chunks.items():
            if state != "scored":
                self._lease(order, keys)

    def end(self):
        """The last checkpoint, and what was still open."""
        self.save()
        self.ledger.leave_unused([key for keys, *_ in self.chunks.values() for key in keys], "the run ended")
        self.ledger.close()
        return self.path
