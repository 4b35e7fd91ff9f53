"""Checks of the addresses of a reward service (SSRF protection).

A name is resolved for every connection, its addresses are checked, and the connection goes to the checked address, so
that a name cannot change in between (DNS rebinding). The metadata services of cloud machines hand out credentials on
link-local addresses; no configuration allows these.
"""

import asyncio
import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from rlhf_ray.config.loopback import is_loopback

Address = IPv4Address | IPv6Address

METADATA = tuple(map(ip_network, (
    "169.254.0.0/16",  # AWS, Azure, Google and others, as all of link-local
    "fd00:ec2::254/128",  # AWS over IPv6
    "fd20:ce::254/128",  # Google over IPv6
    "100.100.100.200/32",  # Alibaba
    "168.63.129.16/32",  # Azure's wire server, a public address
    "192.0.0.192/32",  # Oracle
)))
_NAT64 = ip_network("64:ff9b::/96")


class ForbiddenAddressError(Exception):
    """A host that resolves to a forbidden address."""


async def resolve(host: str, port: int, allow_hosts: Collection[str]) -> list[str]:
    """The addresses of a host, all of them permitted; at least one.

    Raises:
        ForbiddenAddressError: one of them is not permitted.
        OSError: the name cannot be resolved.
    """
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    allowed = host.lower() in {h.lower() for h in allow_hosts}
    for text in addresses:
        reason = refusal(ip_address(text), allowed, is_loopback(host))
        if reason:
            raise ForbiddenAddressError(f"{host} resolves to {text}, {reason}")
    return addresses


def refusal(address: Address, allowed: bool, local_by_name: bool) -> str | None:
    """Why an address is forbidden; None if it is allowed.

    Args:
        allowed: the host is in allow_hosts, which allows loopback and private addresses.
        local_by_name: the host is named as this machine, which allows loopback addresses.
    """
    address = _inner(address)
    if address.is_link_local or any(address in network for network in METADATA):
        return "a link-local or metadata address, which is never allowed; give another host"
    if address.is_multicast or address.is_unspecified or (address.is_reserved and not address.is_loopback):
        return "which cannot be a server's address; give another host"
    if allowed or address.is_global or (address.is_loopback and local_by_name):
        return None
    return "a private address; if that is intended, add the host to allow_hosts"


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for (mapped, NAT64, 6to4, Teredo), or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address
