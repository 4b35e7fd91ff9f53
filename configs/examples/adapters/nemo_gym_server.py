"""A resources server of NeMo-Gym with a shop. Run it where the package `nemo-gym` is installed (Python 3.12, and not
here: it needs versions of others that vLLM does not take): python nemo_gym_server.py [PORT]. Servers that come with
NeMo-Gym are started by its own `ng_run`."""

import sys

import uvicorn
from fastapi import Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from omegaconf import OmegaConf
from pydantic import BaseModel, Field

PRICES = {"tea": 3, "rice": 5, "soap": 4, "salt": 1}


class Item(BaseModel):
    item: str


class Seed(BaseSeedSessionRequest):
    item: str


class Verify(BaseVerifyRequest):
    item: str


class Shop(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    bought: dict[str, list[str]] = Field(default_factory=dict)

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/look_up")(self.look_up)
        app.post("/buy")(self.buy)
        return app

    async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
        self.bought[request.session[SESSION_ID_KEY]] = []
        return BaseSeedSessionResponse()

    async def look_up(self, body: Item) -> dict[str, int]:
        return {"euros": PRICES.get(body.item, 0)}

    async def buy(self, request: Request, body: Item) -> dict[str, str]:
        self.bought[request.session[SESSION_ID_KEY]].append(body.item)
        return {"bought": body.item}

    async def verify(self, request: Request, body: Verify) -> BaseVerifyResponse:
        reward = float(self.bought.pop(request.session[SESSION_ID_KEY]) == [body.item])
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
                          global_config_dict=OmegaConf.create({}))
    config = BaseResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="", name="shop")
    uvicorn.run(Shop(config=config, server_client=client).setup_webserver(), host="127.0.0.1", port=port,
                log_level="warning")
