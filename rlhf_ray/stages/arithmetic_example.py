"""`rlhf-ray example arithmetic`: rewards from exact checks instead of a reward model, through the ordinary stages.

A small model imitates pupils who add column by column and usually forget the carry (SFT). Then only right answers are
rewarded, and the model becomes better than its demonstrations; held-out sums measure it.
"""

from pathlib import Path
from typing import Any

from rlhf_ray.data.arithmetic import write_arithmetic
from rlhf_ray.data.arithmetic_steps import sums_in, write_steps
from rlhf_ray.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
from rlhf_ray.observability.run_directory import read_json
from rlhf_ray.stages.bundled_recipes import Recipe
from rlhf_ray.stages.example_stages import print_verdict, run_stages

RECIPE = Recipe("examples/arithmetic", home="runs/arithmetic")
SHOWN = ("reward", "kl", "length", "finished", "distinct")


def run(directory: Path, estimator: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        overrides: `--section.key=value` changes of the reinforcement learning.

    Returns:
        The summary of the reinforcement learning, with "seconds" of each stage.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    run_dir, seconds = run_stages(RECIPE, "arithmetic", directory, seed, estimator, overrides, make_data)
    print_verdict(run_dir, seconds, "reward", "held-out sums right", SHOWN)
    return {**read_json(run_dir / "summary.json"), "seconds": seconds}


def make_data(directory: Path, seed: int) -> None:
    """Write sums, demonstrations, labelled steps and a character tokenizer, unless they exist."""
    data = directory / "data"
    if (data / "tokenizer" / "tokenizer.json").is_file():
        return
    print("data: writing sums")
    files = write_arithmetic(data, seed)
    write_steps(data, sums_in(files.prompts), seed)
    train_tokenizer([], SMALLEST_VOCABULARY, data / "tokenizer")
