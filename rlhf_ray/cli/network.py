"""The doctor's look at what a cluster needs of the network: ports that are free, and a token that nobody else reads."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from rlhf_ray.cli.finding import Finding

PORTS = {6379: "`ray start --head` (--port)", 8265: "Ray's dashboard and job API (--dashboard-port)",
         10001: "Ray's client server (--ray-client-server-port)"}
"""Those of a head node by default, and the option that names others. A private local cluster takes free ones."""
OTHERS_MAY_READ = 0o077


def taken(port: int) -> bool:
    """Whether something listens at a port of this machine's loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def check_ports(is_taken: Callable[[int], bool] = taken) -> Finding:
    """Whether a head node could start here, and any process listen at all."""
    try:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("fail", "ports", f"nothing can listen at 127.0.0.1: {error}",
                       "Ray's processes talk over loopback; allow it (a sandbox or firewall forbids it)")
    busy = [port for port in PORTS if is_taken(port)]
    if not busy:
        return Finding("ok", "ports", ", ".join(map(str, PORTS)) + " are free")
    advice = "; ".join(f"{port} is for {PORTS[port]}" for port in busy)
    return Finding("warn", "ports", f"{', '.join(map(str, busy))} taken, by a Ray cluster perhaps",
                   f"a run of its own takes free ports; to start a head node here as well, name others: {advice}")


def check_token(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> Finding:
    """Whether clusters that are started here ask for a token, and whether it is a secret."""
    mode = environment.get("RAY_AUTH_MODE", "")
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    if mode == "disabled":
        return Finding("warn", "auth", "RAY_AUTH_MODE=disabled", "a cluster started here runs code for whoever reaches "
                       "it; unset the variable, or set it to token")
    if environment.get("RAY_AUTH_TOKEN"):
        return Finding("ok", "auth", "a token in RAY_AUTH_TOKEN")
    if not file.is_file():
        return Finding("ok", "auth", "no token yet: a local cluster makes one. To join or start others: "
                                     "ray get-auth-token --generate")
    if file.stat().st_mode & OTHERS_MAY_READ:
        return Finding("warn", "auth", f"a token in {file}, which others may read", f"chmod 600 {file}")
    return Finding("ok", "auth", f"a token in {file}")
