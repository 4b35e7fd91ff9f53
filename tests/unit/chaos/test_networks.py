"""A private network, in which a node can be cut off. In a process of its own, because a process cannot leave one."""

import subprocess
import sys

import pytest

from chaos.requirements import NETWORK_NAMESPACES, PACKET_LOSS

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


LOSS = """
import socket, subprocess, sys
from chaos.networks import NodeNetwork, losing_packets, use_private_network
use_private_network()
node = NodeNetwork(1)
code = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 7000)); print(1, flush=True)\\n" \\
       "while True: s.sendto(*s.recvfrom(9))"
server = node.popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
server.stdout.readline()
here = socket.socket(type=socket.SOCK_DGRAM)

def answered():
    count = 0
    for number in range(400):
        here.sendto(b"%d" % number, (node.address, 7000))
        here.settimeout(0.02)
        try:
            count += here.recv(9) == b"%d" % number
        except TimeoutError:
            pass
    return count

before = answered()
with losing_packets(0.2) as dropped:
    meanwhile, lost = answered(), dropped()
print(before, meanwhile, lost, answered())
server.kill()
server.wait()
node.close()
"""


@pytest.mark.skipif(bool(PACKET_LOSS.missing()), reason=PACKET_LOSS.missing() or "")
def test_a_share_of_the_packets_is_lost_in_both_directions():
    done = subprocess.run([sys.executable, "-c", LOSS], capture_output=True, text=True, timeout=60)
    before, meanwhile, lost, afterwards = map(int, done.stdout.split())
    assert before > 380 and afterwards > 380
    assert 200 < meanwhile < 310, "0.8 of 400 arrive, and 0.8 of their answers"
    assert lost >= 400 - meanwhile - 20
