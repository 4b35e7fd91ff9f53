"""No episode can hold a step: whatever happens to episodes and their runners, a step has a whole batch, or the run ends
with an error of its own or saved, within a time that follows from the configuration."""

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import DataError, RewardError, RunInterrupted, WorkerError
from tests.unit.coordinator.episode_runs import CALL_S, START_S, EpisodeRun, Played, Repair

CASES = int(os.environ.get("FUZZ_CASES", 0))
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""For ledgers: on a disk they take most of the time."""
USES = ("train", "mask", "zero", "quarantine")
PARTS = st.sampled_from([0.0, 0.01, 0.3, 0.999])
"""Of a deadline."""


def played(how="answers"):
    return st.builds(Played, st.lists(st.sampled_from(USES), min_size=1, max_size=4).map(tuple), st.just(how), PARTS,
                     st.booleans())


LOST = st.builds(Played, how=st.sampled_from(["dies", "hangs"]), part=PARTS)
ERRORS = st.builds(Played, how=st.sampled_from(["breaks", "raises"]), part=PARTS)
ALL_LEAVE = st.just(Played(("quarantine",)))
CALLS = st.one_of(st.just(Played()), played(), played(), played("loses"), LOST, LOST, LOST, ERRORS)
REPAIRS = st.builds(Repair, st.sampled_from(["starts", "dies", "hangs", "fails", "fails"]), PARTS)


@st.composite
def configurations(draw, prompts=4, staleness=2):
    """Of a run of three steps."""
    samples = draw(st.sampled_from([1, 2]))
    dynamic = samples > 1 and draw(st.booleans())
    group = {"estimator": "grpo"} if samples > 1 else {"estimator": "reinforce_pp"}
    sampling = {"dynamic_sampling": {"max_batches": draw(st.sampled_from([2, 3]))}} if dynamic else {}
    return PPOConfig(
        model={"path": "m"}, prompts={"path": "p"}, run={"steps": 3, "seed": 5}, rewards={"e": {"type": "environment"}},
        environments={"tools": {"path": "tools.py:add", "concurrency": 4, "timeout_s": {
            "reset": 10, "step": 10, "episode": draw(st.sampled_from([20, 60]))}}},
        generator={"chunk": samples * draw(st.sampled_from([1, 2, 4]))},
        algorithm={**group, **sampling, "mini_batches": 1},
        reward={"quarantine_limit": draw(st.sampled_from([0.01, 0.3, 1.0]))},
        coordinator={"prompts_per_step": prompts, "samples_per_prompt": samples,
                     "max_staleness": draw(st.integers(0, staleness))},
        cluster={"max_restarts": draw(st.integers(0, 2)), "start_timeout_s": START_S, "call_timeout_s": CALL_S})


def proven(cases):
    return settings(max_examples=CASES or cases, derandomize=not CASES, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))


def check_end(run, ended):
    """Whole, or with a typed end, or saved; and what there was to save is saved."""
    assert ended.left == [], "chunks are still being made"
    if ended.error is None:
        assert ended.step == run.config.run.steps or ended.exhausted
        return
    assert type(ended.error).exit_code and isinstance(
        ended.error, (RewardError, WorkerError, DataError, RunInterrupted)), repr(ended.error)
    if isinstance(ended.error, RunInterrupted):
        assert ended.saved is not None, "a stop is a saved stop"
    saved_at = ended.saved.step if ended.saved is not None else 0
    assert saved_at == ended.step, "the last step is not saved"


def go_on(run, saved):
    """The run from what was saved, without any further fault: it makes all steps."""
    again = EpisodeRun(run.config, run.summary, run.directory, rows=run.rows, bounded=run.bounded, saved=saved)
    ended = again.go()
    assert ended.error is None and (ended.step == run.config.run.steps or ended.exhausted)


@proven(100)
@given(config=configurations(), calls=st.lists(CALLS, min_size=4, max_size=30), repairs=st.lists(REPAIRS, max_size=8),
       workers=st.integers(1, 2), seed=st.integers(0, 2**16), rows=st.sampled_from([5, 10, 40]), bounded=st.booleans(),
       stop_at=st.none() | st.floats(0, 60) | st.floats(0, 2000))
def test_every_step_has_a_whole_batch_or_the_run_ends_with_what_it_had_saved(
        summary, config, calls, repairs, workers, seed, rows, bounded, stop_at):
    bounded = bounded and config.algorithm.dynamic_sampling is not None  # as `stages.ppo` has it
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        run = EpisodeRun(config, summary, Path(directory), calls, repairs, False, workers, seed, stop_at, rows, bounded)
        ended = run.go()
        check_end(run, ended)
        if ended.error is not None and ended.saved is not None:
            go_on(run, ended.saved)


@proven(120)
@given(config=configurations(prompts=2, staleness=1), calls=st.lists(CALLS | ALL_LEAVE | LOST, min_size=1, max_size=3),
       repairs=st.lists(REPAIRS, max_size=2), workers=st.integers(1, 2), seed=st.integers(0, 2**16),
       rows=st.integers(1, 4))
def test_a_run_in_which_the_same_goes_wrong_again_and_again_ends(summary, config, calls, repairs, workers, seed, rows):
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        run = EpisodeRun(config, summary, Path(directory), calls, repairs, True, workers, seed, rows=rows)
        check_end(run, run.go())
