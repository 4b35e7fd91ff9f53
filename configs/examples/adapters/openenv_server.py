"""A server of OpenEnv with a number to guess. Run it where the package `openenv` is installed (not here: it needs
versions of others that vLLM does not take): python openenv_server.py [PORT [SESSIONS]]."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed=None, episode_id=None, highest=9):
        self._number = random.Random(seed).randint(1, highest)
        self._state = State(episode_id=episode_id)
        return Hint(hint=f"Guess a number from 1 to {highest}.")

    def step(self, action, timeout_s=None):
        self._state.step_count += 1
        digits = [int(c) for c in action.message if c.isdigit()]
        if not digits:
            return Hint(hint="Write a number.", reward=0.0)
        if digits[-1] == self._number:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="More." if digits[-1] < self._number else "Less.", reward=0.0)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
