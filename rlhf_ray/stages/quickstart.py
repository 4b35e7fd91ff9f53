"""`rlhf-ray quickstart`: sentiment, the classic first task, through the ordinary stages and configurations.

A small model learns to write reviews (SFT). An independent judge ranks pairs of its samples, a reward model learns the
ranking, and PPO trains the policy on that reward. At the end the judge, which PPO did not use, scores the policy.
"""

import json
import time
from pathlib import Path
from typing import Any

from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.model import Family
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.data.synthetic_reviews import write_reviews
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.report import write_report
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.tables import changes, print_before_after, print_texts
from rlhf_ray.stages import ppo, preferences, reward_model, sft
from rlhf_ray.stages.bundled_recipes import Recipe, refuse_other_start, run_once, timed
from rlhf_ray.stages.preflight import check_engine

VOCABULARY = 1024
RECIPE = Recipe("quickstart", home="runs/quickstart")
STAGE_TITLES = {"sft": "SFT", "reward_model": "pairs and reward model", "total": "in all, with Ray's start"}
VERDICT = ("gold", "reward", "kl", "perplexity", "length", "finished", "distinct", "distinct_bigrams")


def run(directory: Path, seed: int, overrides: list[str], family: Family = "llama") -> dict[str, Any]:
    """Run all stages, PPO in `directory` itself and the others below it; finished stages are kept.

    Args:
        family: of the new model.
        overrides: `--section.key=value` changes of the PPO stage.

    Returns:
        The contents of summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    began = time.perf_counter()
    home = RunDirectory(directory)
    if home.finished_stage() == "quickstart":
        print(f"finished earlier, in {directory}; --fresh starts over")
        with home.owned():
            return _verdict(home, read_json(home.summary)["seconds"])
    home.path.mkdir(parents=True, exist_ok=True)
    ppo_config = RECIPE.config("ppo", directory, seed, overrides)
    check_engine(ppo_config.cluster, ppo_config.generator)
    if ppo_config.logging.judge is None or ppo_config.evaluation is None:
        raise ConfigError("the quickstart ends with the judge's verdict on held-out responses: keep logging.judge "
                          "and evaluation, or run the `rlhf-ray ppo` stage alone")
    refuse_other_start(directory, seed, family)
    seconds = {"data": timed(lambda: make_data(directory, seed))}
    print("starting Ray")
    with ray_session(ClusterConfig(), {"default": PoolConfig(cpus=2)}, "quickstart"):
        seconds |= make_models(directory, seed, family)
        seconds["ppo"] = run_once("ppo", lambda: ppo.run(ppo_config, True), directory)
    seconds["total"] = max(time.perf_counter() - began, sum(seconds.values()))
    with home.owned():
        return _verdict(home, seconds)


def make_models(directory: Path, seed: int, family: Family = "llama") -> dict[str, float]:
    """Data, SFT model and reward model below `directory`; finished stages are kept.

    Returns:
        Seconds of the stages "sft" and "reward_model" (with its pairs), now or earlier.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    make_data(directory, seed)
    first = RECIPE.config("sft", directory, seed, [f"--model.architecture.family={family}"])
    seconds = {"sft": run_once("sft", lambda: sft.run(first, True), directory / "sft")}
    pairs = run_once("preferences", lambda: preferences.run(RECIPE.config("preferences", directory, seed), True),
                     directory / "preferences")
    model = run_once("reward_model", lambda: reward_model.run(RECIPE.config("reward-model", directory, seed), True),
                     directory / "reward_model")
    return seconds | {"reward_model": pairs + model}


def make_data(directory: Path, seed: int) -> None:
    """Write reviews and prompts and train the tokenizer, unless they exist."""
    data = directory / "data"
    if (data / "tokenizer" / "tokenizer.json").is_file():
        return
    print("data: writing reviews and training a tokenizer")
    files = write_reviews(data, seed)
    with files.sft.open() as rows:
        train_tokenizer((json.loads(row)["text"] for row in rows), VOCABULARY, data / "tokenizer")


def _verdict(home: RunDirectory, seconds: dict[str, float]) -> dict[str, Any]:
    """Print the table and three texts; write summary.json and the report of the whole quickstart."""
    evaluation = read_json(home.evaluation)
    numbers = read_json(home.summary)
    accuracy = read_json(home.path / "reward_model" / "summary.json")["accuracy"]
    titles = {**STAGE_TITLES, "ppo": numbers.get("method", "PPO")}
    summary = {**numbers, "stage": "quickstart", "reward_model_accuracy": accuracy,
               "seconds": seconds}
    home.write_json("summary.json", summary)
    report = write_report(home.path, term=home.term)
    sides = (evaluation["before"], evaluation["after"])
    before, after = ({name: side[name] for name in VERDICT if name in side} for side in sides)
    print_before_after(changes(before, after))
    print_texts(evaluation["texts"][:3])
    print(f"reward model: {accuracy:.1%} of held-out pairs ranked as the judge does")
    print(f"verdict: the independent judge, which was not used in training, gives {before['gold']:.2f} before and "
          f"{after['gold']:.2f} after" + (f", at a KL of {after['kl']:.1f} nats" if "kl" in after else ""))
    print("seconds: " + ", ".join(f"{titles.get(name, name)} {value:.0f}" for name, value in seconds.items()))
    print(f"model: {home.model}\nreport: {report}")
    return summary

