"""What is known of a cluster's address before Ray tries it."""

import socket
from collections.abc import Iterator

import pytest

from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import ClusterError


@pytest.fixture
def deserted() -> Iterator[str]:
    """An address of this machine that is taken, and where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_an_address_where_nobody_listens_is_refused_at_once(deserted: str) -> None:
    with (pytest.raises(ClusterError, match=f"nothing takes connections at cluster.address='{deserted}'.*ray start"),
          ray_session(ClusterConfig(address=deserted), {}, "test")):
        pass


@pytest.mark.parametrize("address", ["no-such-host.invalid:6379", "127.0.0.1:99999", ("a" * 70) + ":6379"])
def test_an_address_that_is_none_is_refused_in_words(address: str) -> None:
    with (pytest.raises(ClusterError, match="correct host and port"),
          ray_session(ClusterConfig(address=address), {}, "test")):
        pass
