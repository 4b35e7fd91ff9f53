"""The journals of a run of three updates, as its learners and the reward service write them; tests spoil them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from chaos.witness.data_order import DataOrder
from chaos.witness.journals import WEIGHTS
from chaos.witness.testimony import testify
from chaos.witness.versions import Versions
from chaos.witness.weights import digest_of, keep
from tests.models import make_tiny_llama

STEPS, PROMPTS, SAMPLES, EPOCHS = 3, 2, 2, 2
LEARNERS = ("policy_learner_0", "policy_learner_1", "critic_learner_0")


@dataclass
class Journals:
    """Lines by journal; a test changes them before `testify`."""

    root: Path
    order: DataOrder
    lines: dict[str, list[dict]]

    def testify(self, max_staleness: int = 0):
        """What the witness says of them."""
        config = self.root / "run.yaml"
        settings = yaml.safe_load(config.read_text())
        settings["coordinator"]["max_staleness"] = max_staleness
        config.write_text(yaml.safe_dump(settings))
        for name, lines in self.lines.items():
            (self.root / "journals" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return testify(config, self.root / "run", self.root / "journals")

    def of(self, event: str, name: str = "policy_learner_0", **fields):
        """The lines of an event in a journal, with these fields."""
        return [line for line in self.lines[name] if line["event"] == event and fields.items() <= line.items()]

    def every(self, event: str, **fields):
        """The lines of an event in the journals of all learners."""
        return [line for name in LEARNERS for line in self.of(event, name, **fields)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model, and its weights after each update, the initial ones included."""
    directory = make_tiny_llama(tmp_path_factory.mktemp("witness") / "model", vocab=64, tied=False, hidden=32, heads=1)
    tensors, draw = load_file(directory / "model.safetensors"), np.random.default_rng(3)
    found = [tensors]
    for _ in range(STEPS):
        tensors = {name: t + 0.05 * draw.standard_normal(t.shape).astype(np.float32) for name, t in tensors.items()}
        found.append(tensors)
    return directory, found


@pytest.fixture
def journals(tmp_path, model):
    """Of a run without any defect. All ranks of the policy make the same step; the rows are split between them."""
    directory, weights = model
    prompts = [(7, 8), (9,), (3, 4, 5), (11, 2), (12, 30)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": " ".join(f"w{t}" for t in prompt)}) + "\n" for prompt in prompts))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({
        "run": {"steps": STEPS, "seed": 5}, "prompts": {"path": str(data), "max_tokens": 8},
        "coordinator": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        "algorithm": {"epochs": EPOCHS, "mini_batches": 1}, "policy": {"workers": 2}, "critic": {"workers": 1},
        "model": {"path": str(directory)}, "generator": {"sampling": {}}}))
    kept = tmp_path / "journals" / WEIGHTS
    kept.mkdir(parents=True)
    for tensors in weights:
        keep(tensors, kept)
    (tmp_path / "run/model").mkdir(parents=True)
    save_file(weights[-1], tmp_path / "run/model/model.safetensors")
    order = DataOrder(prompts, 5)
    return Journals(tmp_path, order, _lines(order, [digest_of(tensors) for tensors in weights],
                                            Versions(directory, kept, 1.0)))


def _lines(order, digests, versions):
    """A clock that counts lines, and samples of random tokens."""
    visits, draw, lines, now = order.visits(), np.random.default_rng(4), {"reward_service": []}, iter(range(1000))
    for name in LEARNERS:
        lines[name] = [{"event": "start", "time": next(now), "life": "1", "weights": digests[0]}]
    policy = lines["policy_learner_0"]
    for number in range(1, STEPS + 1):
        tokens = [(*order.prompts[row], *draw.integers(2, 64, 4).tolist()) for row in
                  (next(visits) for _ in range(PROMPTS)) for _ in range(SAMPLES)]
        rows = versions.logprobs(digests[number - 1], tokens)
        samples = [{"tokens": sample, "logprobs": row[-4:].tolist()}
                   for sample, row in zip(tokens, rows, strict=True)]
        lines["reward_service"].append({"event": "scored", "time": next(now), "samples": tokens})
        policy.append({"event": "rollouts", "time": next(now), "life": "1",
                       "samples": [{**sample, "versions": [number - 1] * 4} for sample in samples]})
        for name in LEARNERS:
            share = {"policy_learner_0": tokens[::2], "policy_learner_1": tokens[1::2]}.get(name, tokens)
            for index in range(EPOCHS):
                batch = {"batch": samples} if name == "policy_learner_0" and not index else {}
                lines[name].append({"event": "fed", "time": next(now), "life": "1", "update": number, "index": index,
                                    "applied": True, "rows": list(map(list, share)), **batch})
            lines[name].append({"event": "update", "time": next(now), "life": "1", "update": number,
                                "before": digests[number - 1], "weights": digests[number]})
    return lines
