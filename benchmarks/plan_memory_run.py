"""One small run whose processes are watched: `python -m benchmarks.plan_memory_run CASE.json OUT.json`.

CASE.json holds a stage, its configuration and the shape of the models to make for it. OUT.json gets the configuration
with lengths as they came out, and the highest resident memory of every worker, the object store's pages left out.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

INTERVAL_S = 0.05
LOOK_FOR_NEW = 10
"""Looks between two at which processes there are."""
PROMPT = "The hotel that we booked on the last day of October was"
ROW = "the room was clean and the desk clerk was kind and we slept well " * 8


class Watch(threading.Thread):
    """Looks at every process below this one, again and again, and keeps the most that each has held."""

    def __init__(self) -> None:
        super().__init__(name="memory watch", daemon=True)
        self._peaks: dict[int, tuple[str, float]] = {}
        """Name and MiB by process id."""
        self._over = threading.Event()

    def run(self) -> None:
        """Until `finish`."""
        import psutil

        me, looks, pids = psutil.Process(), 0, []
        while not self._over.wait(INTERVAL_S):
            if looks % LOOK_FOR_NEW == 0:
                pids = [child.pid for child in me.children(recursive=True)]
            looks += 1
            for pid in pids:
                self._look(pid)

    def _look(self, pid: int) -> None:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            held = sum(int(status[f"Rss{kind}"].split()[0]) for kind in ("Anon", "File")) / 1024
        except (OSError, ValueError, KeyError):
            return  # it has ended
        name, most = self._peaks.get(pid, ("", 0.0))
        self._peaks[pid] = (title.removeprefix("ray::").partition(".")[0] if "ray::" in title else name,
                            max(most, held))

    def finish(self) -> dict[str, list[float]]:
        """Stop looking; MiB that each worker held at most by the class of its role, the largest first."""
        self._over.set()
        self.join()
        found: dict[str, list[float]] = {}
        for name, most in self._peaks.values():
            found.setdefault(name, []).append(most)
        return {name: sorted(all_of_them, reverse=True) for name, all_of_them in found.items() if name}


def make_models(shape: dict[str, Any], directory: Path) -> None:
    """A random Llama with a tokenizer, and a classifier of the same shape, saved in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from benchmarks.workload import SEED
    from rlhf_ray.data.synthetic_reviews import make_reviews
    from rlhf_ray.data.tokenizer import train_tokenizer

    torch.manual_seed(SEED)
    texts = [review.text for review in make_reviews(500, SEED)]
    for name, made in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        train_tokenizer(iter(texts), 512, directory / name)
        labels = {"num_labels": 1} if name == "reward" else {}
        made(LlamaConfig(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=2, **labels)).save_pretrained(
            directory / name)


def make_data(stage: str, config: dict[str, Any], directory: Path) -> None:
    """Rows that are all alike, and their length as the most allowed: so micro-batches are as full as planned."""
    from rlhf_ray.config.model import ModelConfig
    from rlhf_ray.models.loading import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(path=str(directory / "policy")))
    row = {"prompt": PROMPT} if stage == "ppo" else {"prompt": PROMPT, "response": ROW}
    path = directory / "rows.jsonl"
    path.write_text((json.dumps(row) + "\n") * 256)
    tokens = len(tokenizer(PROMPT + row.get("response", ""))["input_ids"])
    config["prompts" if stage == "ppo" else "data"] |= {"path": str(path), "max_tokens": tokens + 2}


def in_a_child(work: Any, *arguments: Any) -> None:
    """Call it in a forked process, so that this one stays small."""
    if os.fork() == 0:
        work(*arguments)
        os._exit(0)
    os.wait()


def main() -> None:
    """Make models and rows, run the stage, write what was seen."""
    case, directory = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    in_a_child(make_models, case["shape"], directory)
    from rlhf_ray import run
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.config.load import STAGES

    quiet_libraries()
    make_data(case["stage"], case["config"], directory)
    config = STAGES[case["stage"]](**case["config"])
    watch = Watch()
    watch.start()
    run(config)
    Path(sys.argv[2]).write_text(json.dumps({"config": case["config"], "held_mib": watch.finish()}))


if __name__ == "__main__":
    main()
