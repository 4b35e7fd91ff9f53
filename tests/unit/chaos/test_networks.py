"""A private network, in which a node can be cut off. In a process of its own, because a process cannot leave one."""

import subprocess
import sys

import pytest

from chaos.requirements import NETWORK_NAMESPACES

SCRIPT = """
import subprocess, sys, time
from chaos.networks import NodeNetwork, has_private_network, use_private_network
assert not has_private_network() and use_private_network() and has_private_network()
node = NodeNetwork(1)
code = "import socket; s = socket.create_server(('', 7000)); print(1, flush=True); [s.accept() for _ in range(9)]"
server = node.popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
server.stdout.readline()
found = [node.is_reachable(7000)]
node.cut()
found.append(node.is_reachable(7000))
node.heal()
found.append(node.is_reachable(7000))
NodeNetwork(1).close()  # the interfaces of a driver that was killed are still there
node.close()
print(found, server.wait(5) if server.poll() is None and server.kill() is None else None)
"""


@pytest.mark.skipif(bool(NETWORK_NAMESPACES.missing()), reason=NETWORK_NAMESPACES.missing() or "")
def test_a_node_with_its_own_address_is_cut_off_and_reached_again():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("[True, False, True]"), done.stderr
