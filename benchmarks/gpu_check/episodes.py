"""A run with episodes of several turns on one GPU, half of them in an environment and half by an agent, ended in the
middle of a step and continued."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_check.cluster import AGAIN, configuration, resumed_rows, run_rows, whole_steps
from benchmarks.gpu_check.pair import make_models
from benchmarks.gpu_check.pair_settings import ON_CPU, ON_GPU, Scale
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place
from rlhf_ray.data.tool_template import give_tool_template

STEPS, ENDED_AFTER = 4, 2
TURNS, ENDS = 6, 4
"""Turns of an episode. In the longest turn, random weights would write so many of the tokens that end one: the
tokenizer's own they rarely write."""
VOCABULARY = 8192
"""On a GPU. vLLM compares each token with all that end a turn, so these have to be few."""
GROUP = 8
WORLD = '''"""The same world twice: as an environment, and as an agent with a loop of its own."""

import json
import urllib.request

TURNS = {turns}
ANSWER = "the answer to this turn is a row of words of about the same length each time. " * 2


class World:
    def reset(self, row, seed):
        self.turn = 0
        return {{"messages": [{{"role": "user", "content": row["prompt"]}}]}}

    def step(self, reply):
        self.turn += 1
        return {{"messages": [{{"role": "user", "content": ANSWER}}], "done": self.turn >= TURNS,
                "reward": min(1.0, len(reply.text) / 100)}}


def agent(row, session):
    messages, reward = [{{"role": "user", "content": row["prompt"]}}], 0.0
    for _ in range(TURNS):
        body = json.dumps({{"model": session.model, "messages": messages}}).encode()
        request = urllib.request.Request(
            session.base_url + "/chat/completions", body,
            {{"Content-Type": "application/json", "Authorization": "Bearer " + session.api_key}})
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        reward += min(1.0, len(message["content"] or "") / 100)
        messages += [message, {{"role": "user", "content": ANSWER}}]
    return reward
'''


def continued(place: Place) -> Iterator[Row]:
    """GRPO by `rlhf-ray ppo`, whose driver is killed in the middle of the third step; then `--resume`."""
    scale, run = replace(ON_GPU, vocabulary=VOCABULARY) if place.gpu else ON_CPU, place.directory / "run"
    model = make_models(place.directory, scale, "policy")["policy"]
    give_tool_template(model.path)
    (place.directory / "world.py").write_text(WORLD.format(turns=TURNS))
    prompts = [{"prompt": f"task {i}", "environment": ("world", "agent")[i % 2]} for i in range(STEPS * scale.rows)]
    (place.directory / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    file = place.directory / "grpo.yaml"
    file.write_text(yaml.safe_dump(_configuration(place.directory, scale, model.path)))
    began = time.perf_counter()
    code = yield from run_rows(file, run, _killed_in_a_step, {})
    seconds = time.perf_counter() - began
    yield judged("a run that is killed in the middle of a step", f"exit code {code}", code == -signal.SIGKILL,
                 f"{len(whole_steps(run))} steps in {seconds:.1f} s")
    journals = sum(each.stat().st_size for each in (run / "episodes").glob("*/*.journal"))
    yield Row("its journals", f"{journals / 1e6:.2f} MB")
    if AGAIN * seconds > place.left_s:
        yield not_run("the same, resumed", f"the first took {seconds:.0f} s, and {place.left_s:.0f} s were left")
        return
    code = yield from run_rows(file, run, _step_rows, {}, "--resume")
    yield judged("the same, resumed", f"exit code {code}", code == 0)
    if code:
        return
    steps = whole_steps(run)
    went_on = sum(row.get("episodes/continued", 0.0) for row in steps[ENDED_AFTER:]) * scale.rows
    yield judged("episodes that continued after their last turn", f"{went_on:.0f}", went_on > 0,
                 f"of {scale.rows} that were open or done")
    yield from resumed_rows(steps, STEPS, scale.tolerance)


def _step_rows(_: subprocess.Popen[bytes], step: dict[str, Any]) -> Iterator[Row]:
    generation = step["time/episodes"]
    samples = step["throughput/samples_per_second"] * step["time/step"]
    turns = samples * step["episodes/turns"]
    tokens = samples * step["response/length"]
    yield Row(f"episodes: step {step['step']}", f"{step['time/step']:.2f} s",
              f"generation {generation:.2f}, update {step['time/policy_update']:.2f}, publication "
              f"{step.get('time/publish', 0.0):.2f}; {step['episodes/turns']:.2f} turns an episode, "
              f"{turns / generation:,.0f} turns/s, {tokens / generation:,.0f} sampled tokens/s")


def _killed_in_a_step(process: subprocess.Popen[bytes], step: dict[str, Any]) -> Iterator[Row]:
    """As `_step_rows`; after step `ENDED_AFTER`, the run is killed when half of what its generation took has passed."""
    yield from _step_rows(process, step)
    if step["step"] == ENDED_AFTER:
        time.sleep(0.5 * step["time/episodes"])
        process.kill()


def _configuration(directory: Path, scale: Scale, model: str) -> dict[str, Any]:
    """As the whole run's, without a critic and rewards beside the environments'."""
    values = configuration(directory, scale, model)
    del values["critic"], values["rewards"]
    bounds = {"max_turns": TURNS, "max_tokens": scale.episode, "concurrency": scale.rows,
              "on_failure": {"overflow": "train"}}
    longest = scale.response // 2
    sampling = {"max_tokens": longest, "stop_token_ids": list(range(0, scale.vocabulary, longest // ENDS))}
    return {
        **values,
        "run": {**values["run"], "steps": STEPS},
        "algorithm": {"estimator": "grpo", "epochs": 1, "mini_batches": 1},
        "environments": {name: {"path": f"{directory}/world.py:{what}", **bounds}
                         for name, what in (("world", "World"), ("agent", "agent"))},
        "generator": {**values["generator"], "sampling": sampling},
        "coordinator": {"prompts_per_step": scale.rows // GROUP, "samples_per_prompt": GROUP},
        "checkpoint": {"every": 1},
    }
