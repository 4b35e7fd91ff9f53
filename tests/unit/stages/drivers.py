"""A driver of a run as far as its files go."""

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts

FACTS = LedgerFacts(1, 1, 0, (9,), 0, False, (1.0,))
FILE_ONLY = LoggingConfig(tensorboard=False, ray_metrics=False)


class Driver:
    """What a driver writes with. Its weights are its name."""

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self.name, self.directory = name, directory
        self.store = CheckpointStore(directory.checkpoints, 9, term=directory.term)
        self.store.clean()
        start = self.store.latest()
        self.step = start.step if start else 0
        directory.ownership.go_on_from(self.step or None)
        self.metrics = MetricsWriter(directory.path, FILE_ONLY, self.step, directory.term)
        self.ledger = (
            Ledger.resume(directory.ledger, start.path / "ledger.sqlite", FACTS, directory.term) if start
            else Ledger.create(directory.ledger, FACTS, directory.term))

    def consume(self) -> None:
        keys = [SampleKey(0, self.step, 0)]
        self.ledger.admit(keys, [self.step + 1])
        self.ledger.start_attempt(keys, self.step)
        self.ledger.generated(keys, self.name)
        self.ledger.scored(keys, self.step)
        self.step += 1
        self.ledger.consumed(keys, self.step)

    def begin(self):
        tmp = self.store.begin(self.step)
        (tmp / "weights").write_text(self.name)
        self.ledger.save(tmp / "ledger.sqlite")
        return tmp

    def make_a_step(self) -> None:
        self.consume()
        self.store.commit(self.begin(), self.step)
        self.ledger.mark_committed(self.step)
        self.metrics.write(self.step, {"loss": 1.0})
        self.directory.write_json("status.json", {"of": self.name})
