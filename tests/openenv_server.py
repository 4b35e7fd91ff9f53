"""A server of OpenEnv whose environment lists tools and takes their calls as actions (its MCPEnvironment), for
`tests/slow/test_openenv_server.py`, which runs it where the package is installed: python openenv_server.py PORT."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import CallToolAction, MCPEnvironment, State, create_app
from openenv.core.env_server.mcp_types import CallToolObservation

PRICES = {"tea": 3, "rice": 5}


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("shop")

        @server.tool
        def look_up(item: str) -> int:
            """Price of an item in euros."""
            return PRICES[item]

        @server.tool
        def buy(item: str, count: int = 1) -> str:
            """Buy an item."""
            self.bought = item
            return f"bought {count} {item}"

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, item="tea", **kwargs):
        self.item, self.bought = item, ""
        self._state = State(episode_id=episode_id)
        return CallToolObservation(tool_name="", result=f"Buy {item}.")

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and self.bought:
            observation.reward, observation.done = float(self.bought == self.item), True
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
