"""The relay between two processes: it forwards, slowly if told so, and a link that is cut carries nothing."""

import socket
import threading
import time

import pytest

from chaos.relay import Relay


@pytest.fixture
def relay():
    """A relay to a server that returns what it receives."""
    server = socket.create_server(("127.0.0.1", 0))

    def echo():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=lambda c=connection: [c.sendall(data) for data in iter(lambda: c.recv(99), b"")],
                             daemon=True).start()

    threading.Thread(target=echo, daemon=True).start()
    found = Relay(f"127.0.0.1:{server.getsockname()[1]}")
    yield found
    found.close()
    server.close()


def test_a_link_is_slow_or_cut_until_it_may_pass_again(relay):
    host, port = relay.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as link:
        def answered_after(text):
            began = time.monotonic()
            link.sendall(text)
            assert link.recv(99) == text
            return time.monotonic() - began

        usual = answered_after(b"one")
        relay.command("slow 0.2")
        time.sleep(0.1)
        assert answered_after(b"two") > usual + 0.3, "there and back"
        relay.command("cut")
        time.sleep(0.1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)
        link.settimeout(0.3)
        link.sendall(b"three")
        with pytest.raises(TimeoutError):
            link.recv(99)
        relay.command("pass")
        link.settimeout(5)
        assert link.recv(99) == b"three", "what was sent meanwhile arrives"
        assert answered_after(b"four") < 0.3
        socket.create_connection((host, int(port)), timeout=5).close()
