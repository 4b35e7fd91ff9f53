"""`python -m chaos.relay HOST:PORT`: a TCP relay to an address, whose link can be made slow or cut.

It prints its own port, reads commands from its standard input, a line each, and ends with it:

    pass: forward everything (at first). Connections are refused once nothing takes connections at the address.
    slow SECONDS: forward everything so much later, in both directions.
    cut: forward nothing, and refuse connections; what was sent meanwhile arrives after the next `pass`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

CHUNK_BYTES = 1 << 16
POLL_S = 0.05


class Relay:
    """A relay process, as its parent sees it."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "chaos.relay", target], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = f"{target.rpartition(':')[0]}:{int(self._process.stdout.readline())}"

    def command(self, line: str) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class _Link:
    """The state of the link."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.delay_s, self.is_cut = 0.0, False
        self.server: asyncio.Server | None = None

    async def listen(self, own_port: int = 0) -> int:
        """Take connections; returns the port."""
        self.server = await asyncio.start_server(self.serve, self.host, own_port)
        return int(self.server.sockets[0].getsockname()[1])

    def refuse(self) -> None:
        """Refuse connections from now on."""
        if self.server is not None:
            self.server.close()
            self.server = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection."""
        try:
            there_reader, there_writer = await asyncio.open_connection(self.host, self.port)
        except OSError:  # whoever tries next must see that there is nothing behind this
            writer.close()
            self.refuse()
            return
        await asyncio.gather(self._forward(reader, there_writer), self._forward(there_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self.delay_s)
                while self.is_cut:
                    await asyncio.sleep(POLL_S)
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()


async def _main(target: str) -> None:
    host, _, port = target.rpartition(":")
    link = _Link(host, int(port))
    own_port = await link.listen()
    print(own_port, flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode().split():
        link.is_cut, link.delay_s = line[0] == "cut", float(line[1]) if line[0] == "slow" else 0.0
        if link.is_cut:
            link.refuse()
        elif link.server is None:
            await link.listen(own_port)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
