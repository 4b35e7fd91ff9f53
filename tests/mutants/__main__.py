"""`python -m tests.mutants`: draws mutants, runs the unit tests that reach each, and lists those that survive."""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from tests.mutants import fork_server
from tests.mutants.fork_server import Ended, ForkServer
from tests.mutants.line_coverage import LineCoverage, Recorder
from tests.mutants.report import Outcome, Summary, read_equivalents, reason_for, without_source
from tests.mutants.sites import Mutant, draw
from tests.mutants.tree_copy import TreeCopy, copies_of

CHECKOUT = Path(__file__).parents[2]
RESULTS = CHECKOUT / "build/mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MUTATED = (
    "rlhf_ray/algorithms/**/*.py", "rlhf_ray/replay/**/*.py", "rlhf_ray/checkpoint/**/*.py",
    "rlhf_ray/weights/manifest*.py", "rlhf_ray/roles/*.py",
)
# Their unit tests, and those of the packages that use them.
TESTED = ("coordinator", "roles", "replay", "checkpoint", "weights", "algorithms", "engine", "stages", "models", "data")
MARKERS = "not slow and not gpu and not cluster"


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.list:
        for mutant in draw(sources_of(CHECKOUT, options.only), options.count, options.seed):
            print(f"{mutant.path}:{mutant.line} {mutant.function}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        summary = run(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    summary.save(RESULTS)
    print(f"\n{summary.text()}{RESULTS.relative_to(CHECKOUT)}/summary.json has every mutant.")
    return 0 if summary.passed else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants to draw (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0): same code and seed, same mutants")
    parser.add_argument("--workers", type=int, default=2, help="mutants tested at once (2)")
    parser.add_argument("--only", help="draw from the files that match this pattern, such as '*/replay/*'")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser.parse_args(arguments)


def sources_of(folder: Path, only: str | None = None) -> dict[str, str]:
    """{path: text} of the files to mutate, those that match the pattern `only`."""
    paths = {str(path.relative_to(folder)): path for pattern in MUTATED for path in folder.glob(pattern)}
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(paths.items())
            if only is None or fnmatch(name, only)}


def run(options: argparse.Namespace, scratch: Path) -> Summary:
    started = time.monotonic()
    copies = copies_of(CHECKOUT, scratch, options.workers)
    server = ForkServer(scratch, options.workers)
    targets = sources_of(copies[0].path)
    tests = measure_coverage(server, copies, list(targets))
    fork_server.import_others(tests.modules)
    equivalents = read_equivalents(EQUIVALENT)
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    mutants = draw(sources_of(copies[0].path, options.only), options.count, options.seed)
    for ended in server.map(mutants, lambda mutant, slot: try_mutant(mutant, tests, copies[slot], scratch),
                            lambda mutant: limit_s(mutant, tests)):
        copies[ended.slot].restore()
        outcome = outcome_of(ended, tests, reason_for(ended.job, equivalents))
        outcomes.append(outcome)
        if outcome.unexplained:
            say(outcome.text())
        killed, each = sum(o.by is not None for o in outcomes), (time.monotonic() - begun) / len(outcomes)
        left = each * (options.count - len(outcomes))
        progress(f"{len(outcomes)}/{options.count} mutants, {killed} killed, {left / 60:.1f} min left", len(outcomes))
    return Summary(options.seed, options.count, time.monotonic() - started, outcomes,
                   without_source(equivalents, targets.values()))


def measure_coverage(server: ForkServer, copies: list[TreeCopy], targets: list[str]) -> LineCoverage:
    """Runs the unit tests once, a package at a time, unless the same code was measured before."""
    digest = hashlib.sha256()
    for path in sorted(path for part in ("rlhf_ray", "tests") for path in (copies[0].path / part).rglob("*.py")):
        if path.parent.name != "mutants":
            digest.update(path.read_bytes())
    saved = RESULTS / f"tests-{digest.hexdigest()[:16]}.json"
    if saved.exists():
        return LineCoverage.load(saved)
    fork_server.import_others(["torch", "transformers", "hypothesis", "pydantic"])
    tests = LineCoverage()

    def measure(package: str, slot: int) -> str:
        copy, temporary = copies[slot].path, server.scratch / f"temporary-{slot}"
        fork_server.enter(copy, temporary)
        recorder = Recorder(copy, targets, server.scratch / f"processes-{package}")
        fork_server.pytest.main(["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", MARKERS,
                                 f"--basetemp={temporary / 'pytest'}", f"tests/unit/{package}"], plugins=[recorder])
        answer = server.scratch / f"measured-{package}.json"
        answer.write_text(json.dumps(recorder.recorded()))
        return str(answer)

    packages = [package for package in TESTED if (copies[0].path / "tests/unit" / package).is_dir()]
    for ended in server.map(packages, measure, lambda package: 1800):
        if ended.answer is None:
            raise RuntimeError(f"tests/unit/{ended.job} cannot be measured:\n"
                               + (server.scratch / f"output-{ended.slot}.txt").read_text()[-4000:])
        copies[ended.slot].restore()
        tests.add(json.loads(Path(ended.answer).read_text()))
        progress(f"measured tests/unit/{ended.job} in {ended.seconds:.0f} s: {len(tests.seconds)} tests", 0)
    for name in tests.failed:
        say(f"left out, for it does not pass unmutated: {name}")
    tests.save(saved)
    return tests


def try_mutant(mutant: Mutant, tests: LineCoverage, copy: TreeCopy, scratch: Path) -> str | None:
    """In a fork: the test that notices the mutant, or None."""
    batches = tests.tests_for(mutant)
    copy.mutate(mutant.path, mutant.source)
    temporary = scratch / f"temporary-{copy.path.name}"
    fork_server.enter(copy.path, temporary)
    try:
        return fork_server.run_tests(batches, temporary, seconds_per_test(mutant, tests))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seconds_per_test(mutant: Mutant, tests: LineCoverage) -> float:
    slowest = max((tests.seconds[test] for batch in tests.tests_for(mutant) for test in batch), default=0.0)
    return max(20.0, 5 * slowest)


def limit_s(mutant: Mutant, tests: LineCoverage) -> float:
    expected = sum(tests.seconds[test] for batch in tests.tests_for(mutant) for test in batch)
    return 30 + seconds_per_test(mutant, tests) + 3 * expected


def outcome_of(ended: Ended, tests: LineCoverage, reason: str | None) -> Outcome:
    mutant: Mutant = ended.job
    by = "time limit" if ended.timed_out else "crash" if ended.crashed else ended.answer
    return Outcome(mutant.path, mutant.line, mutant.function, mutant.before, mutant.after, by,
                   sum(map(len, tests.tests_for(mutant))), tests.reach(mutant), round(ended.seconds, 2), reason)


def say(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def progress(text: str, done: int) -> None:
    """One line that is written over in a terminal; every tenth in a log."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)
    elif done % 10 == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
