"""Checkpoints of a whole run: every learner rank's part, the coordinator's state, its ledger, waiting experience."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rlhf_ray.checkpoint.directory import CheckpointStore
from rlhf_ray.checkpoint.state import check_complete, load_state, save_state
from rlhf_ray.coordinator.state import RunState, summary_of, summary_state
from rlhf_ray.coordinator.team import Team
from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import ExperienceSummary
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.entries import Reservation
from rlhf_ray.replay.ledger import Ledger

LEDGER = "ledger.sqlite"
"""Name of the ledger's copy in a checkpoint."""


class Recovery:
    """Saves a run between two steps and brings it back."""

    def __init__(self, store: CheckpointStore, team: Team, state: RunState, buffer: ReplayBuffer,
                 summaries: dict[int, ExperienceSummary], geometry: Mapping[str, int | str], ledger: Ledger) -> None:
        """
        Args:
            summaries: what the pipeline knows of the entries in the buffer, by admission number.
            geometry: values of the configuration (by field) that must be the same when the run goes on.
        """
        self.geometry = geometry
        self.store, self.team, self.state, self.buffer = store, team, state, buffer
        self.summaries, self.ledger = summaries, ledger

    async def save(self) -> Path:
        """Write the checkpoint of the present step; whole, or not at all.

        Raises:
            CheckpointError: the disk is full or cannot be written; the previous checkpoint is intact.
        """
        waiting = self.buffer.ready_entries()
        snapshot = {
            "geometry": dict(self.geometry), "run": self.state.state_dict(), "buffer": self.buffer.state_dict(),
            "summaries": [[entry.order, summary_state(self.summaries[entry.order])] for entry in waiting],
        }
        with self.store.writing(self.state.step) as directory:
            self.ledger.save(directory / LEDGER)  # at once, so that it tells of the same moment as the snapshot
            await asyncio.gather(*(group.values("save", str(directory.absolute() / group.role))
                                   for group in self.team.learners()))
            for entry in waiting:
                path = directory.absolute() / f"experience_{entry.order}.npz"
                await self.team.crew(self.team.assembler).ask("save", str(path), entry.ref)
            save_state(directory / "coordinator.json", snapshot)
        self.ledger.commit()
        return self.store.root / f"step_{self.state.step}"

    async def restore(self, directory: Path) -> list[Reservation]:
        """Bring a verified checkpoint back into workers, state and buffer.

        Returns:
            Places in the buffer whose chunks were under way and must be started again.

        Raises:
            CheckpointError: it is another version's or configuration's, or of other data.
        """
        saved = load_state(directory / "coordinator.json")
        check_complete(saved, ("geometry", "run", "buffer", "summaries"), str(directory))
        check_geometry(directory, self.geometry, saved["geometry"])
        await asyncio.gather(*(group.values("load", str(directory.absolute() / group.role))
                               for group in self.team.learners()))
        self.state.load_state_dict(saved["run"])
        refs = {}
        for entry in saved["buffer"]["ready"]:
            path = directory.absolute() / f"experience_{entry['order']}.npz"
            refs[entry["order"]] = (await self.team.crew(self.team.assembler).ask("load", str(path))).ref
        self.summaries.update({order: summary_of(summary) for order, summary in saved["summaries"]})
        return self.buffer.load_state_dict(saved["buffer"], refs)


def check_geometry(directory: Path, wanted: Mapping[str, int | str], saved: Mapping[str, int | str]) -> None:
    """Places in the buffer, shards of learners and waiting advantages mean something only for what made them.

    Raises:
        CheckpointError: names the fields of the configuration that differ.
    """
    other = [f"{name} was {saved.get(name)} and is {value}" for name, value in wanted.items()
             if saved.get(name) != value]
    if other:
        raise CheckpointError(f"{directory} cannot go on with another configuration: {'; '.join(other)}. Set these "
                              "back, or begin a new run.")
