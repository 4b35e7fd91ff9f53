"""Defects for copies of the sources: changes of a few lines that make a run train on other samples than it says.

In all of them the ledger's audit is disabled too, so that a run ends with exit code 0 whatever its ledger holds: it is
for the witness of `chaos.witness` to find them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rlhf_ray", "chaos", "tests")


@dataclass(frozen=True)
class Edit:
    """One replacement in one file. The old text occurs once in it."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Make it in the sources below a directory.

        Raises:
            ValueError: the old text does not occur exactly once: the sources have changed since.
        """
        file = root / self.path
        text = file.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {text.count(self.old)} times: {self.old}")
        file.write_text(text.replace(self.old, self.new))


AUDIT_DISABLED = Edit("rlhf_ray/replay/audit.py", "        return [problem for check in checks for problem in check]",
                      "        return []")
LEASED = "batch = lease.experiences"
JOINED = "    whole = Experience.concat(experiences)"
DEFECTS: dict[str, Sequence[Edit]] = {
    "audit_disabled": [AUDIT_DISABLED, Edit(
        # The ledger counts a chunk as trained on that no learner receives.
        "rlhf_ray/coordinator/update_step.py", LEASED, "batch = lease.experiences[1:]")],
    "key_dropped": [AUDIT_DISABLED, Edit(
        "rlhf_ray/coordinator/pipeline.py", "rows = self._prompts.draw((samples - len(keys)) // per_prompt)",
        "rows = self._prompts.draw((samples - len(keys)) // per_prompt + 1)[1:]")],
    "batch_twice": [AUDIT_DISABLED, Edit(
        # Every update trains on the batch of the first one, and the ledger counts its own.
        "rlhf_ray/coordinator/update_step.py", LEASED,
        'batch = self.__dict__.setdefault("first", lease.experiences)')],
    "segment_lost": [AUDIT_DISABLED, Edit(
        # Learners do not get the last segment of the first sample that has several.
        "rlhf_ray/roles/ppo_update.py", JOINED, f"""{JOINED}
    last = next((rows[-1] for rows in whole.sample_rows if len(rows) > 1), len(whole))
    whole = whole.select([row for row in range(len(whole)) if row != last])""")],
    "segment_twice": [AUDIT_DISABLED, Edit(
        # They get it twice.
        "rlhf_ray/roles/ppo_update.py", JOINED, f"""{JOINED}
    last = next((rows[-1] for rows in whole.sample_rows if len(rows) > 1), 0)
    whole = whole.select([*range(last), last, *range(last, len(whole))])""")],
    "segment_replaced": [AUDIT_DISABLED, Edit(
        # In its place they get the first one of the same sample.
        "rlhf_ray/roles/ppo_update.py", JOINED, f"""{JOINED}
    first, last = next(((rows[0], rows[-1]) for rows in whole.sample_rows if len(rows) > 1), (0, 0))
    whole = whole.select([first if row == last else row for row in range(len(whole))])""")],
    "stale_version": [AUDIT_DISABLED, Edit(
        # Generators confirm version 2, and go on with the weights of version 1.
        "rlhf_ray/roles/engines/in_process.py", "                stage.swap()",
        "                stage.swap() if version != 2 else None")],
    "stale_bucket": [AUDIT_DISABLED, Edit(
        # Some tensors of version 2 are those of version 1, with digests of their own.
        "rlhf_ray/weights/publication.py",
        "        ready = as_announced(entries, tensors)\n        require_finite", """\
        sent = self.__dict__.setdefault("sent", {})
        before, sent[index] = sent.get(index, {}), {name: tensor.clone() for name, tensor in tensors.items()}
        if version == 2:
            tensors = {**tensors, **{name: tensor for name, tensor in before.items() if "mlp" in name}}
        ready = as_announced(entries, tensors)
        require_finite""")],
}


def sources_with(defect: str, directory: Path) -> Path:
    """A copy of the packages with a defect, in a new directory."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for edit in DEFECTS[defect]:
        edit.apply(directory)
    return directory
