"""Evaluations of a run on disk: the first, the latest, and texts of both."""

from typing import Any

from rlhf_ray.coordinator.evaluation import Evaluation
from rlhf_ray.observability.run_directory import RunDirectory, read_json


class EvaluationLog:
    """Writes evaluation.json: measurements of the policy before the first step and at the latest evaluation."""

    def __init__(self, directory: RunDirectory, resume_at: int | None) -> None:
        self._directory = directory
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        if resume_at is not None and (saved := read_json(directory.evaluation)):
            self._before = _measured(saved, "before")
            if 0 < saved["step"] <= resume_at:
                self._after = _measured(saved, "after")

    def add(self, step: int, evaluation: Evaluation) -> None:
        """Record an evaluation; the one at step 0 is the "before"."""
        entry = {"metrics": evaluation.metrics, "texts": evaluation.texts}
        if step == 0:
            self._before = entry
        else:
            self._after = entry
        if self._before is None:
            return
        after = self._after or self._before
        # A run that was resumed with a different held-out set has different prompts now.
        pairs = [(b, a) for b, a in zip(self._before["texts"], after["texts"], strict=False)
                 if _asked(b) == _asked(a)]
        self._directory.write_json("evaluation.json", {
            "step": step, "before": self._before["metrics"], "after": after["metrics"],
            "texts": [{**_asked(b), "before": b["response"], "after": a["response"]} for b, a in pairs],
        })

    def last(self) -> dict[str, float]:
        """Metrics of the latest evaluation; empty when there is none."""
        return (self._after or self._before or {}).get("metrics", {})

    def summary(self) -> dict[str, float]:
        """The numbers for summary.json: gold and reward before and after, and the other metrics of the latest
        evaluation."""
        if self._before is None or self._after is None:
            return {}
        before, after = self._before["metrics"], self._after["metrics"]
        summary: dict[str, float] = {}
        for name in ("gold", "reward"):
            if name in before:
                summary |= {f"{name}_before": before[name], f"{name}_after": after[name]}
        return summary | {name: after[name] for name in after if name not in ("gold", "reward", "responses")}


def _asked(text: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a text, with its messages if it is a conversation."""
    return {name: text[name] for name in ("prompt", "messages") if name in text}


def _measured(saved: dict[str, Any], side: str) -> dict[str, Any]:
    """One side of evaluation.json, as it was measured."""
    texts = [{**_asked(row), "response": row[side]} for row in saved["texts"]]
    return {"metrics": saved[side], "texts": texts}
