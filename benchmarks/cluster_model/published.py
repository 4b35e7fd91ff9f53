"""Step times that other systems published, beside ours for the same model, GPUs, batch and lengths.

`published.json` has what each source says: every figure was read there. `null` stands for what a source leaves out.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.cluster_model.prediction import Predicted, Refused, predict
from benchmarks.cluster_model.run_shape import RunShape
from rlhf_ray.planning.roofline import Workload

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """One row of a source."""

    system: str
    date: str
    """Of the page."""
    model: str
    like: str
    """The model of the same or the nearest shape whose figures `rlhf-ray plan` knows."""
    url: str
    gpu: str
    gpus: int
    algorithm: str
    critic: bool
    staleness: int
    prompts: int
    samples_per_prompt: int
    mini_batches: int
    longest_prompt: int
    longest_response: int
    prompt: int | None
    """Mean tokens of a prompt; None if not published."""
    response: int | None
    """Mean tokens of a response; None if not published."""
    seconds: float
    """Of a step."""
    tokens_per_gpu: float | None
    """Tokens a second of one GPU; None if not published."""

    @property
    def run(self) -> RunShape:
        """The same for us. Lengths that are not published are half the longest, as `rlhf-ray plan` assumes."""
        shared = {field.name for field in fields(RunShape)} & {field.name for field in fields(self)} - {"model"}
        work = None
        if self.prompt is not None and self.response is not None:
            work = Workload(self.prompts * self.samples_per_prompt, self.prompt, self.response,
                            self.longest_response / self.response, self.mini_batches)
        return RunShape(model=self.like, work=work, **{name: getattr(self, name) for name in shared})


def published() -> list[Published]:
    """All rows."""
    return [Published(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


FIRST_GOAL = 0.25
"""Share of the peak that updates reach by the project's first goal for GPUs; `rlhf-ray plan` assumes the later 0.40."""


@dataclass(frozen=True)
class Beside:
    """A published row and our predictions for the same shape."""

    row: Published
    ours: Predicted | Refused
    slower: Predicted | Refused
    """If updates reach only `FIRST_GOAL`."""


def beside_ours() -> list[Beside]:
    """All rows with ours."""
    return [Beside(row, predict(row.run), predict(replace(row.run, training_share=FIRST_GOAL))) for row in published()]
