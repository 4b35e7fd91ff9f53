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
from rlhf_ray.observability.tables import changes, print_before_after, print_texts
from rlhf_ray.stages.bundled_recipes import Recipe
from rlhf_ray.stages.example_stages import run_stages

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
    return _verdict(*run_stages(RECIPE, "arithmetic", directory, seed, estimator, overrides, make_data))


def make_data(directory: Path, seed: int) -> None:
    """Write sums, demonstrations, labelled steps and a character tokenizer, unless they exist."""
    data = directory / "data"
    if (data / "tokenizer" / "tokenizer.json").is_file():
        return
    print("data: writing sums")
    files = write_arithmetic(data, seed)
    write_steps(data, sums_in(files.prompts), seed)
    train_tokenizer([], SMALLEST_VOCABULARY, data / "tokenizer")


def _verdict(run_dir: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Print the held-out results before and after: a table, three texts and a sentence."""
    evaluation = read_json(run_dir / "evaluation.json")
    before, after = evaluation["before"], evaluation["after"]
    print_before_after(changes(*({name: side[name] for name in SHOWN if name in side} for side in (before, after))))
    print_texts(evaluation["texts"][:3])
    print(f"verdict: {before['reward']:.1%} of held-out sums right before, {after['reward']:.1%} after")
    print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    print(f"model: {run_dir / 'model'}\nreport: {run_dir / 'report.html'}")
    return {**read_json(run_dir / "summary.json"), "seconds": seconds}
