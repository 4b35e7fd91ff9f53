"""Servers of the Model Context Protocol: their tools are the policy's. Spoken by the client of the package `mcp`.

A server that is started (stdio) is a process of the episode; what is left of it ends with the environment's process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, Tool

from rlhf_ray.environments.adapters.function_schemas import function_schema
from rlhf_ray.environments.adapters.servers import OPEN_S, is_local, token_headers
from rlhf_ray.user_code.process import MARK

PAGES = 100
"""Pages of a list of tools that are read at most."""


def make(settings: dict[str, Any]) -> type:
    """A class with the server's tools, for `McpSource` as JSON."""
    given: dict[str, Any] = {"settings": settings, "replayable": settings["replayable"]}
    if settings["reward_tool"]:
        given["get_reward"] = McpTools.final_reward
    return type("McpServer", (McpTools,), given)


class McpTools:
    """One episode with a server."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}
        self._tools: dict[str, Tool] = {}
        self._client: Client | None = None
        self._done: asyncio.Event | None = None
        self._session: asyncio.Task[None] | None = None

    @classmethod
    def tool_schemas(cls) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the policy may call.

        Raises:
            ValueError: the server has no such tools.
            ConnectionError: it cannot be reached, or ends.
        """
        return asyncio.run(cls()._schemas())

    async def _schemas(self) -> list[dict[str, Any]]:
        try:
            await self._connect()
            return [function_schema(tool.name, tool.description or tool.title or "", tool.input_schema)
                    for tool in self._offered()]
        finally:
            await self.close()

    def _offered(self) -> list[Tool]:
        reserved = (self.settings["reset_tool"], self.settings["reward_tool"])
        names = self.settings["tools"] or [name for name in self._tools if name not in reserved]
        for name in (*names, *filter(None, reserved)):
            if name not in self._tools:
                raise ValueError(f"the server has no tool {name!r}; its tools are {', '.join(self._tools) or 'none'}")
        if not names:
            raise ValueError("the server has no tools that the policy may call; its tools are "
                             f"{', '.join(self._tools) or 'none'}")
        return [self._tools[name] for name in names]

    async def reset(self, seed: int, **columns: Any) -> str | None:
        """Connect to the server, and call its `reset_tool`."""
        self._columns = {"seed": seed, **columns}
        await self._connect()
        name = self.settings["reset_tool"]
        text = (await self._of_row(name))[0] if name else ""
        return f"\n\n{text}" if text else None

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What the policy reads, and whether the tool failed.

        Raises:
            ConnectionError: the server has ended.
        """
        try:
            result = await self._call(name, arguments)
        except MCPError as error:  # the server lives, and refuses the call
            return f"Error: {name}: {error}", True
        return result_text(result), result.is_error

    async def final_reward(self) -> float:
        """What `reward_tool` answers: a number as its structured content, as "reward" or "result" in that, or as text.

        Raises:
            ValueError: it is no number.
        """
        name = self.settings["reward_tool"]
        text, structured = await self._of_row(name)
        if isinstance(structured, dict):
            structured = structured.get("reward", structured.get("result"))
        if isinstance(structured, int | float):
            return float(structured)
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"the tool {name!r} answered {text[:200]!r}, which is no reward; it must be a number"
                             ) from None

    async def _of_row(self, name: str) -> tuple[str, Any]:
        """Text and structured content of a tool that is called with the columns of the row that it names.

        Raises:
            RuntimeError: it failed.
        """
        names = self._tools[name].input_schema.get("properties", {})
        result = await self._call(name, {key: value for key, value in self._columns.items() if key in names})
        if result.is_error:
            raise RuntimeError(f"the tool {name!r} failed: {result_text(result)}")
        return result_text(result), result.structured_content

    async def _call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        assert self._client is not None, "reset comes first"
        try:
            return await self._client.call_tool(name, arguments, read_timeout_seconds=self.settings["timeout_s"])
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or await self._is_gone():
                raise ConnectionError(f"the MCP server ended its connection while its tool {name!r} ran") from None
            if error.code == REQUEST_TIMEOUT:
                raise MCPError(REQUEST_TIMEOUT, f"it gave no answer within {self.settings['timeout_s']:g} s") from None
            raise

    async def _is_gone(self) -> bool:
        """Whether a server with a URL does not answer at all: its client reports that as an answer of the server."""
        if not self.settings["url"]:
            return self._session is None or self._session.done()
        assert self._client is not None
        try:
            await self._client.session.list_tools()
        except MCPError as error:
            return error.code != REQUEST_TIMEOUT
        return False

    async def _connect(self) -> None:
        """Begin a session, and list its tools."""
        self._done = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The client has to be left by the task that entered it.
        self._session = asyncio.create_task(self._hold(ready, self._done))
        await ready
        assert self._client is not None
        cursor = None
        for _ in range(PAGES):
            page = await self._client.list_tools(cursor=cursor)
            self._tools.update({tool.name: tool for tool in page.tools})
            if (cursor := page.next_cursor) is None:
                return
        raise ValueError(f"the list of the server's tools has more than {PAGES} pages")

    async def _hold(self, ready: asyncio.Future[None], done: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await self._opened(stack))
                ready.set_result(None)
                await done.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(ConnectionError(f"there is no MCP server at {self._where()}: {_root(error)}"))
            elif not done.is_set():
                raise

    async def _opened(self, stack: AsyncExitStack) -> Client:
        """A client that is not connected yet."""
        settings = self.settings
        if settings["command"]:
            variables = {MARK: os.environ[MARK]} if MARK in os.environ else {}
            program, *arguments = settings["command"]
            server = StdioServerParameters(command=program, args=arguments, env=variables | settings["variables"])
            return Client(stdio_client(server, errlog=sys.__stderr__ or sys.stderr), cache=None)
        # A response may be open for as long as a tool runs, and the stream of the server's messages for the episode.
        http = await stack.enter_async_context(httpx2.AsyncClient(
            headers=token_headers(settings), timeout=httpx2.Timeout(OPEN_S, read=None),
            trust_env=not is_local(settings["url"])))
        # Only the handshake of the versions until 2025-11-25 begins a session, which an episode needs.
        return Client(streamable_http_client(settings["url"], http_client=http), cache=None, mode="legacy")

    def _where(self) -> str:
        return str(self.settings["command"] or self.settings["url"])

    async def close(self) -> None:
        """End the session, and a server that was started for it."""
        if self._session is None or self._done is None:
            return
        self._done.set()
        await asyncio.wait([self._session])
        self._session = self._client = None


def result_text(result: CallToolResult) -> str:
    """What a tool answered as the policy reads it: its texts, a placeholder for anything else, and its structured
    content as JSON if there is neither."""
    parts = []
    for part in result.content:
        if part.type == "text":
            parts.append(part.text)
        elif part.type == "resource" and hasattr(part.resource, "text"):
            parts.append(part.resource.text)
        elif part.type == "resource":
            parts.append(f"[{part.resource.mime_type or 'resource'}: {part.resource.uri}]")
        elif part.type == "resource_link":
            parts.append(f"[resource: {part.uri}]")
        else:
            parts.append(f"[{part.mime_type}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _root(error: BaseException) -> str:
    """The first error of groups of errors, with its name."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MCPError | httpx2.HTTPError | OSError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"
