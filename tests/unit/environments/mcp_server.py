"""A server with what tools of the Model Context Protocol may answer, run by test_mcp.py: by stdio, or at a port."""

import os
import sys
import time
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from pydantic import BaseModel

server = MCPServer("everything", log_level="CRITICAL")
state: dict[str, Any] = {"count": 0, "task": None}


class Place(BaseModel):
    street: str
    number: int | None = None


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


@server.tool()
def count() -> int:
    state["count"] += 1
    return int(state["count"])


@server.tool()
def visit(place: Place, note: str | None = None) -> dict[str, Any]:
    return {"street": place.street, "number": place.number, "note": note}


@server.tool(structured_output=False)
def two_texts() -> list[Any]:
    return ["one", "zwei €"]


@server.tool(structured_output=False)
def picture() -> list[Any]:
    return ["see", Image(data=b"x" * 5000, format="png")]


@server.tool()
def nothing_but_structure() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"ü": [1, None]})


@server.tool()
def resource() -> CallToolResult:
    text = TextResourceContents(uri="file:///a", text="of a file")
    return CallToolResult(content=[EmbeddedResource(resource=text, type="resource")])


@server.tool()
def fails(message: str) -> str:
    raise ToolError(message)


@server.tool()
def refuses() -> CallToolResult:
    return CallToolResult(content=[TextContent(text="no\nmore")], is_error=True)


@server.tool()
def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@server.tool()
def ends() -> str:
    os._exit(3)


@server.tool()
def pid() -> int:
    return os.getpid()


@server.tool()
def variables() -> str:
    return " ".join(sorted(os.environ))


@server.tool()
def authorization(ctx: Context) -> str:
    request = ctx.request_context.request
    return str(request.headers.get("authorization")) if request is not None else "none"


@server.tool()
def begin(task: str, seed: int) -> str:
    if task == "impossible":
        raise ToolError("cannot be begun")
    state["task"] = f"{task} {seed}"
    return f"Begun: {state['task']}."


@server.tool()
def score(task: str) -> float:
    return 0.25 if state["task"] and state["task"].startswith(task) else float("nan")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
