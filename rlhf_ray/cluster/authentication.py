"""Whether a Ray cluster lets in whoever asks. Ray's API runs code for its callers, so an open one runs anybody's."""

import grpc

from rlhf_ray.config.hosts import is_loopback
from rlhf_ray.errors import ClusterError

ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""The control service's smallest question."""
TIMEOUT_S = 10.0
PROTECTED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)
"""What one says that wants a token, or TLS."""


def require_token(address: str) -> None:
    """Refuse a cluster that others can reach and that has no authentication.

    Args:
        address: host:port of the cluster's control service.

    Raises:
        ClusterError: it does not listen on loopback, and answers without a token.
    """
    if is_loopback(address.rsplit(":", 1)[0]) or not answers_anybody(address):
        return
    raise ClusterError(
        f"the Ray cluster at {address} has no authentication: whoever can reach it can run code there, in your run "
        "too. Start its nodes with RAY_AUTH_MODE=token and one token for all (`ray get-auth-token --generate` makes "
        "one). Where its network is closed to others, cluster.allow_open=true joins it as it is")


def answers_anybody(address: str) -> bool:
    """Whether the control service answers a caller that shows no token. One behind TLS does not.

    Raises:
        ClusterError: it did not answer in time, so nothing is known.
    """
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ClusterError(f"the Ray cluster at {address} did not say within {TIMEOUT_S:g} s whether it asks "
                                   "for a token; try again when it is less busy") from error
            return error.code() not in PROTECTED
    return True
