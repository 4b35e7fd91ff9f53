"""A server of the Model Context Protocol with a purse: items have prices, and what is bought is kept."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PRICES = {"tea": 3, "rice": 5, "soap": 4, "salt": 1}
server = MCPServer("shop", log_level="ERROR")
bought: list[str] = []


@server.tool()
def look_up(item: str) -> int:
    """Price of an item in euros."""
    if item not in PRICES:
        raise ToolError(f"there is no {item}")
    return PRICES[item]


@server.tool()
def buy(item: str) -> str:
    """Buy an item."""
    if item not in PRICES:
        raise ToolError(f"there is no {item}")
    bought.append(item)
    return f"bought {item} for {PRICES[item]} euros"


@server.tool()
def score(item: str) -> float:
    """Reward: 1 if the item that was asked for was bought, and nothing else. The policy does not see this tool."""
    return float(bought == [item])


if __name__ == "__main__":
    server.run()
