"""`python -m tests.compare_commits BASE [HEAD]`: make the same small runs with the code of two commits, and compare
what they leave, bit for bit.

For a change that may not change a result. Each run is made once by either commit, with real Ray, vLLM and DeepSpeed on
the CPU and the same tiny models, and with this interpreter's libraries. Weights, checkpoints, metrics, samples, the
ledger and evaluations must be equal; what a clock tells is left out, and its names are printed. The runs are
synchronous (max_staleness 0), for only then do results not depend on timing.

Exit code 1: a difference; 2: a run failed. All runs together take about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.resumed import CLOCKS, TRAFFIC, samples
from tests.cluster.tiny import PROMPT_TOKENS, RESPONSE_TOKENS, SHARED_BACKBONE, SMALL, Files, make_files, ppo_settings

CHECKOUT = Path(__file__).parents[1]
TIMEOUT_S = 900
LEFT_OUT = {
    "metrics that begin so": ("share/",),
    "values of metrics that begin so (their names are compared)": (*CLOCKS, TRAFFIC),
    "values in summary.json": ("seconds", "seconds_loop", "probe_seconds", "first_rollout_at", "samples_per_second",
                               "checkpoint_pause_seconds"),
}
"""What is not compared, since a clock tells it. A share of no time has no metric."""
NO_METRICS, CLOCK_METRICS, CLOCK_SUMMARY = LEFT_OUT.values()
HERE = "the run's directory"
"""What stands for its path in texts."""
TEXTS = ("evaluation.json", "preferences.jsonl", "left_out.jsonl", "config.yaml", "checkpoints/*/coordinator.json",
         "model*/*.json", "model*/*.md", "adapter*/*.json")
"""Files that are compared line by line."""

FIXED = {"RAY_worker_niceness": "0", "PYTHONHASHSEED": "0"}
"""Variables of each run. peft writes the names of an adapter's layers in the order of a set."""

ONLY_THIS_TREE = """
import os, sys
import rlhf_ray
here = os.path.dirname(os.path.abspath(__file__))
if not rlhf_ray.__file__.startswith(here + os.sep):
    sys.exit(f"{sys.argv}: rlhf_ray comes from {rlhf_ray.__file__}, not from {here}")
"""
"""The sitecustomize.py of a commit's tree, which each of its Python processes runs first: Ray's workers too."""

Settings = dict[str, Any]


def gae(files: Files) -> Settings:
    """Critic, reference, KL in the rewards, two generators, chunks that share a step, and an average of the weights."""
    return {"critic": {"workers": 1, "zero_stage": 1}, "run": {"steps": 2}, "checkpoint": {"every": 1}}


def grpo(files: Files) -> Settings:
    """Groups of one prompt, two sources of rewards, an independent judge, and vLLM's asynchronous engine."""
    algorithm = {"estimator": "grpo", "epochs": 2, "mini_batches": 2, "importance": {"tokens": "truncate"},
                 "overlong_buffer": 4, "reward_normalisation": "standardise", "kl": {"coef": 0.1}}
    sampling = {"max_tokens": RESPONSE_TOKENS, "temperature": 0.9, "top_k": 16, "min_p": 0.005, "min_tokens": 2}
    rewards = {"main": {"type": "model", "path": str(files.reward)},
               "seen": {"type": "regex", "pattern": r"\bw1\d\b", "weight": 0.5}}
    return {**SMALL, "critic": None, "run": {"steps": 2}, "algorithm": algorithm, "rewards": rewards,
            "logging": {"judge": str(files.reward)}, "evaluation": {"limit": 4, "samples_per_prompt": 2},
            "generator": {"workers": 2, "engine": "async", "sampling": sampling},
            "coordinator": {"prompts_per_step": 4, "samples_per_prompt": 4}}


def one_backbone(files: Files) -> Settings:
    """One model is policy and critic."""
    return {**SMALL, "run": {"steps": 2}, "critic": SHARED_BACKBONE}


def lora(files: Files) -> Settings:
    """Adapters: the frozen base is the reference."""
    adapters = {"rank": 4, "alpha": 16, "dropout": 0.1}
    return {**SMALL, "run": {"steps": 2}, "policy": {"workers": 1, "lora": adapters},
            "algorithm": {"kl": {"coef": 0.1}}}


def sharded(files: Files) -> Settings:
    """A policy whose two ranks hold shards of each layer, with pretraining text, an entropy bonus, and updates that
    `target_kl` may end early."""
    text = files.root / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"w{2 + i} w{9 + i} w{20 + i}"}) + "\n" for i in range(24)))
    algorithm = {"epochs": 2, "mini_batches": 2, "entropy_coef": 0.01, "target_kl": 1e-4, "kl": {"coef": 0.1}}
    return {**SMALL, "run": {"steps": 2}, "policy": {"workers": 2, "zero_stage": 3}, "algorithm": algorithm,
            "ptx": {"path": str(text), "max_tokens": 20, "batch_size": 4, "coef": 0.1}}


def preferences(files: Files) -> Settings:
    """Pairs of responses, ranked by a function."""
    judge = files.root / "judge.py"
    judge.write_text("def judge(responses, **_):\n    return [sum(map(ord, r)) % 89 / 89 for r in responses]\n")
    return {
        "pools": {"default": {"cpus": 2}}, "prompts": {"path": str(files.prompts), "max_tokens": PROMPT_TOKENS},
        "pairs": {"min_margin": 0.0, "judge": f"{judge}:judge"},
        "generator": {"workers": 2, "chunk": 4, "max_sequences": 8, "kv_cache_mb": 8,
                      "sampling": {"max_tokens": RESPONSE_TOKENS}},
    }


def sft(files: Files) -> Settings:
    """A supervised stage with two ranks."""
    rows = [{"text": f"w{2 + i} w{9 + i} w{20 + i}"} for i in range(24)]
    return supervised(files, "demonstrations.jsonl", rows, workers=2)


def reward_model(files: Files) -> Settings:
    """Pairs with margins."""
    rows = [{"prompt": f"w{5 + i} w9", "chosen": f"w{20 + i} w30", "rejected": f"w{40 + i}", "gap": i % 4 / 2}
            for i in range(16)]
    settings = supervised(files, "pairs.jsonl", rows, workers=1)
    settings["data"]["margin"] = "gap"
    return settings


def supervised(files: Files, name: str, rows: list[Settings], workers: int) -> Settings:
    """Settings of two updates on a file of rows, half of them held out."""
    path = files.root / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "run": {"steps": 2}, "data": {"path": str(path), "max_tokens": 16, "held_out": 0.5},
        "training": {"batch_size": 4},
        "learner": {"workers": workers, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.003}},
        "logging": {"ray_metrics": False, "tensorboard": False}, "checkpoint": {"every": 1},
    }


RUNS: dict[str, tuple[str, Callable[[Files], Settings]]] = {
    "gae": ("ppo", gae), "grpo": ("ppo", grpo), "one-backbone": ("ppo", one_backbone), "lora": ("ppo", lora),
    "sharded": ("ppo", sharded), "preferences": ("preferences", preferences), "sft": ("sft", sft),
    "reward-model": ("reward-model", reward_model),
}
"""Name of a run -> its command, and what it sets."""


def main() -> int:
    """Make the runs and print the table."""
    options = parsed()
    began = time.monotonic()
    for what, names in LEFT_OUT.items():
        print(f"left out: {what}: {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="compare-") as root:
        place = made(options.keep or Path(root))
        revisions = [options.base, options.head or uncommitted() or "HEAD"]
        trees = [tree_of(revision, place / side) for revision, side in zip(revisions, ("base", "head"), strict=True)]
        files = make_files(made(place / "files"))
        failed, different = [], 0
        print(f"\n{'run':14}{'compared':14}{'values':>10}  outcome")
        for name in options.only or RUNS:
            command, of = RUNS[name]
            config = configuration(command, of, files)
            runs = [made(tree.parent / "runs") / name for tree in trees]
            outcomes = [make(command, config, run, tree) for run, tree in zip(runs, trees, strict=True)]
            if any(outcomes):
                failed.append(name)
                print(f"{name:14}" + next(filter(None, outcomes)), flush=True)
                continue
            for kind, count, outcome in compared(*runs):
                different += outcome != "equal"
                print(f"{name:14}{kind:14}{count:10,}  {outcome}", flush=True)
    print(f"\n{revisions[0]} and {revisions[1]}: {different} differences, {len(failed)} runs failed; "
          f"{time.monotonic() - began:.0f} s")
    return 2 if failed else 1 if different else 0


def parsed() -> argparse.Namespace:
    """The command line."""
    told = [f"  {name:14}{of.__doc__}" for name, (_, of) in RUNS.items()]
    parser = argparse.ArgumentParser(prog="python -m tests.compare_commits", description=__doc__,
                                     epilog="\n".join(["runs:", *told]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit: a hash, branch or tag")
    parser.add_argument("head", metavar="HEAD", nargs="?",
                        help="another commit (default: this checkout, with its changes to files that git knows)")
    parser.add_argument("--only", action="append", choices=RUNS, metavar="RUN", help="make this run (repeatable)")
    parser.add_argument("--keep", type=Path, metavar="DIR",
                        help="a folder for both trees, the runs and their output, which are left there")
    return parser.parse_args()


def uncommitted() -> str:
    """A commit of the checkout as it is; empty if nothing has changed since the last one."""
    return git("stash", "create").decode().strip()


def git(*arguments: str) -> bytes:
    """What git says of this checkout."""
    return subprocess.run(["git", *arguments], cwd=CHECKOUT, check=True, stdout=subprocess.PIPE).stdout


def tree_of(revision: str, place: Path) -> Path:
    """The files of a commit, in a new folder below `place`."""
    tree = made(place / "tree")
    subprocess.run(["tar", "-x", "-C", tree], input=git("archive", revision), check=True)
    (tree / "sitecustomize.py").write_text(ONLY_THIS_TREE)
    return tree


def made(directory: Path) -> Path:
    """The directory, which may have been there."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def configuration(command: str, of: Callable[[Files], Settings], files: Files) -> Path:
    """The configuration file of a run of a command: what `of` sets, over the settings that all have."""
    settings, own = ppo_settings(files, files.root), of(files)
    if command != "ppo":
        settings = {"run": {"seed": 3}, "cluster": settings["cluster"], "model": settings["model"]}
    settings["run"].pop("dir", None)
    for section, values in own.items():
        kept = {} if values is None or section == "rewards" else settings.get(section, {})
        settings[section] = {**kept, **(values or {})}
    path = files.root / f"{of.__name__}.yaml"
    path.write_text(yaml.safe_dump({section: values for section, values in settings.items() if values}))
    return path


def make(
    command: str, config: Path, directory: Path, tree: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Make a run in `directory` with the code in `tree`; returns how it failed, or an empty text."""
    program = (f"import rlhf_ray; assert rlhf_ray.__file__ == {str(tree / 'rlhf_ray/__init__.py')!r}; "
               "from rlhf_ray.cli.main import main; main()")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RLHF_RAY_"))}
    log = directory.with_suffix(".log")
    with log.open("w") as output:
        try:
            code: int | str = subprocess.run(
                [sys.executable, "-c", program, command, str(config), f"--run.dir={directory}"], cwd=tree,
                env={**outside, "PYTHONPATH": str(tree), **FIXED, **(environment or {})},
                stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"nothing after {TIMEOUT_S} s"
    return f"{tree.parent.name} ended with {code}:\n{log.read_text()[-3000:]}" if code else ""


def compared(base: Path, head: Path) -> Iterator[tuple[str, int, str]]:
    """(what was compared, number of values, "equal" or the first difference) of two runs."""
    for kind, read in READERS.items():
        sides = dict(read(base)), dict(read(head))
        if not any(sides):
            continue
        yield kind, sum(size_of(value) for value in sides[0].values()), difference(*sides)


def difference(base: Mapping[str, Any], head: Mapping[str, Any]) -> str:
    """The first place where they differ, with both values."""
    for place in [*base, *(place for place in head if place not in base)]:
        if place not in head:
            return f"{place}: only BASE has it"
        if place not in base:
            return f"{place}: only HEAD has it"
        if not same(base[place], head[place]):
            return f"{place}{told(base[place], head[place])}"
    return "equal"


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same bits; so NaN is NaN, and 0.0 is not -0.0."""
    if hasattr(one, "dtype") and hasattr(other, "dtype"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return repr(one) == repr(other)


def told(one: Any, other: Any) -> str:
    """How two values differ, in a line; of arrays the first numbers that do."""
    if not hasattr(one, "dtype"):
        return f": {one!r:.80} became {other!r:.80}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f": {one.dtype}{list(one.shape)} became {other.dtype}{list(other.shape)}"
    pairs = enumerate(zip(one.reshape(-1), other.reshape(-1), strict=True))
    place, (before, after) = next(pair for pair in pairs if not same(*pair[1]))
    return f"[{place}]: {before} became {after}"


def size_of(value: Any) -> int:
    """Values in a value: the numbers of an array or a list."""
    return value.size if hasattr(value, "size") else len(value) if isinstance(value, list) else 1


def weights(run: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the exported models and adapters."""
    yield from tensors(run, "model*/*.safetensors", "adapter*/*.safetensors")


def checkpoints(run: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the checkpoints: weights and optimizers of policy and critic."""
    yield from tensors(run, "checkpoints/**/*.safetensors")


def tensors(run: Path, *patterns: str) -> Iterator[tuple[str, Any]]:
    """The arrays of files by file and name."""
    from safetensors.numpy import load_file

    for path in sorted(path for pattern in patterns for path in run.glob(pattern)):
        for name, array in sorted(load_file(path).items()):
            yield f"{path.relative_to(run)}: {name}", array


def metrics(run: Path) -> Iterator[tuple[str, Any]]:
    """Every number of every row."""
    for number, line in enumerate(lines(run / "metrics.jsonl"), start=1):
        for name, value in json.loads(line).items():
            if name.startswith(NO_METRICS):
                continue
            yield f"metrics.jsonl row {number}: {name}", "a clock's" if name.startswith(CLOCK_METRICS) else value


def sample_files(run: Path) -> Iterator[tuple[str, Any]]:
    """Every cell of every column."""
    import pyarrow.parquet as pq

    for path in sorted(run.glob("samples/*.parquet")):
        for column, cells in pq.read_table(path).to_pydict().items():
            for row, cell in enumerate(cells, start=1):
                yield f"samples/{path.name} row {row}: {column}", cell


def ledger(run: Path) -> Iterator[tuple[str, Any]]:
    """What became of every sample."""
    for *key, state, version, step in samples(run) if (run / "ledger.sqlite").is_file() else ():
        yield f"ledger.sqlite sample {tuple(key)}", [state, version, step]


def texts(run: Path) -> Iterator[tuple[str, Any]]:
    """Evaluations, pairs, rows that were left out, the state in checkpoints and other texts by line; the summary."""
    for path in sorted(path for pattern in TEXTS for path in run.glob(pattern)):
        for number, line in enumerate(lines(path), start=1):
            yield f"{path.relative_to(run)} line {number}", line.replace(str(run), HERE)
    summary = (run / "summary.json").read_text().replace(str(run), HERE)
    for name, value in json.loads(summary).items():
        yield f"summary.json: {name}", "a clock's" if name in CLOCK_SUMMARY else value


def lines(path: Path) -> list[str]:
    """The lines of a file; none without it."""
    return path.read_text().splitlines() if path.is_file() else []


READERS = {"weights": weights, "checkpoints": checkpoints, "metrics": metrics, "samples": sample_files,
           "ledger": ledger, "texts": texts}

if __name__ == "__main__":
    sys.exit(main())
