"""Whether an address is a loopback address, without resolving names."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether `host` is written as this machine: `localhost`, 127.0.0.0/8 or ::1. Names are not resolved."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
