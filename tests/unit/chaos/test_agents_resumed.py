"""A runner is killed with its gateway in the middle of agents' episodes, at the same moment as in a run: its agents are
gone, nobody answers at its port, and another runner goes on from its journal with the same tokens."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from chaos import environments
from chaos.episode_runs import EpisodeFiles
from chaos.witness.journals import read_environments
from rlhf_ray.roles.episode_journal import JournalPlace
from tests.unit.chaos.test_agents import content, expected, files, injections, left_over, play, witness

__all__ = ["expected", "files", "injections"]
GONE_S, WAIT_S = 15.0, 60.0


def wait_for(condition, seconds=WAIT_S):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("name", ["asker", "client", "program"])
def test_another_runner_goes_on_with_agents_from_the_journal(files, injections, tmp_path, expected, name):
    undisturbed = expected(name)
    paused = environments.paused_file(injections.path, 1)
    environments.order_failure(injections.path, 1, environments.PAUSE, name)
    arguments = [str(files.model), str(files.agent_prompts), ",".join(map(str, files.stops)), name, str(tmp_path / "j")]
    runner = subprocess.Popen([sys.executable, __file__, *arguments],
                              env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})
    try:
        assert wait_for(paused.exists), "no agent paused"
        ports = {each.laddr.port for each in psutil.Process(runner.pid).net_connections() if each.status == "LISTEN"}
        (port,) = ports
    finally:
        runner.kill()
        runner.wait()
    assert wait_for(lambda: left_over(tmp_path / "journals") == [], GONE_S)
    assert not any(each.laddr.port == port and each.status == "LISTEN" for each in psutil.net_connections())
    before = {line["session"] for line in read_environments(tmp_path / "journals")}
    assert before and not {line["session"] for line in read_environments(tmp_path / "journals")
                           if line["event"] == "returned"} >= before
    rollout = play(files, name, journal=JournalPlace(str(tmp_path / "j"), 0, 0, look=True))
    assert content(rollout) == undisturbed
    assert sum(episode.events.get("continued", 0) for episode in rollout.episodes) >= 1
    assert sum(episode.events.get("restarted", 0) for episode in rollout.episodes) == 0
    lines = read_environments(tmp_path / "journals")
    assert witness(files, rollout, lines, name) == []
    assert left_over(tmp_path / "journals") == []


if __name__ == "__main__":
    model, prompts, stops, name, directory = sys.argv[1:]
    Path(directory).mkdir(exist_ok=True)
    given = EpisodeFiles(Path(model), Path(), Path(), list(map(int, stops.split(","))), Path(prompts), Path())
    play(given, name, journal=JournalPlace(directory, 0, 0))
