"""One small run whose processes are watched: `python -m benchmarks.plan_memory_run CASE.json OUT.json`.

CASE.json holds a stage, its configuration, and the models to make for it. OUT.json gets the highest resident memory of
every worker process, the object store's pages left out, and when it was reached.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

INTERVAL_S = 0.05
MIB = 2**20


class Watch(threading.Thread):
    """Looks at every process below this one, again and again, and keeps the most that each has held."""

    def __init__(self) -> None:
        super().__init__(name="memory watch", daemon=True)
        self.peaks: dict[int, dict[str, Any]] = {}
        self._over = threading.Event()

    def run(self) -> None:
        """Until `finish`."""
        import psutil

        me = psutil.Process()
        children: list[Any] = []
        while not self._over.wait(INTERVAL_S):
            if len(self.peaks) < 3 or time.monotonic() % 1 < INTERVAL_S:
                children = me.children(recursive=True)
            for child in children:
                self._look(child.pid)

    def _look(self, pid: int) -> None:
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        except (OSError, ValueError):
            return
        kinds = {kind: int(status.get(f"Rss{kind}", "0 kB").split()[0]) / 1024 for kind in ("Anon", "File", "Shmem")}
        known = self.peaks.setdefault(pid, {"mib": 0.0})
        known["name"] = name or known.get("name", "")
        if (held := kinds["Anon"] + kinds["File"]) > known["mib"]:
            known.update(mib=held, anon=kinds["Anon"], file=kinds["File"], shmem=kinds["Shmem"],
                         hwm=int(status["VmHWM"].split()[0]) / 1024, at=time.time())

    def finish(self) -> list[dict[str, Any]]:
        """Stop looking; the workers of roles with what each held at most, in MiB."""
        self._over.set()
        self.join()
        return [peak for peak in self.peaks.values() if peak.get("name", "").startswith("ray::")]


def make_models(case: dict[str, Any], directory: Path) -> None:
    """A random Llama of the case's shape with a tokenizer, and a classifier of the same shape, saved in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from benchmarks.workload import SEED
    from rlhf_ray.data.reviews import make_reviews
    from rlhf_ray.data.tokenizer import train_tokenizer

    torch.manual_seed(SEED)
    texts = [review.text for review in make_reviews(500, SEED)]
    for name, made in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        train_tokenizer(iter(texts), 512, directory / name)
        labels = {"num_labels": 1} if name == "reward" else {}
        model = made(LlamaConfig(**case["shape"], bos_token_id=0, eos_token_id=1, pad_token_id=2, **labels))
        model.save_pretrained(directory / name)


def main() -> None:
    """Make the models in a process of their own, run the stage, write what was seen."""
    case, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    directory = Path(sys.argv[1]).parent
    if not (directory / "policy").is_dir():
        if os.fork() == 0:
            make_models(case, directory)
            os._exit(0)
        os.wait()
    from importlib import import_module

    from rlhf_ray.cli.quiet import quiet_libraries
    from rlhf_ray.config.load import STAGES

    quiet_libraries()
    config = STAGES[case["stage"]](**case["config"])
    watch = Watch()
    watch.start()
    began = time.time()
    summary = import_module(f"rlhf_ray.stages.{case['stage'].replace('-', '_')}").run(config)
    out.write_text(json.dumps({"workers": watch.finish(), "began": began, "seconds": time.time() - began,
                               "steps": summary["steps"]}))


if __name__ == "__main__":
    main()
