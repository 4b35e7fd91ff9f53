"""HTTP client of one server of a reward service: a single try, its answer or its failure.

There are no retries here, no redirects, no proxies, and no credentials except the token.
"""

import asyncio
import re
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx
from pydantic import SecretStr

from rlhf_ray.rewards.http.allowed_addresses import ForbiddenAddressError, resolve
from rlhf_ray.rewards.http.circuit_breaker import Breaker

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""Idle connections are closed before servers close them (uvicorn: after 5 s), which would be a failure."""
LONGEST_REST_S = 60.0
"""Upper bound of a server's Retry-After."""
EXCERPT = 200
"""Characters of a server's answer in an error message."""


class FailedTry(Exception):
    """A try without a usable answer.

    Args:
        kind: one word for statistics: timeout, connection, dns, address, certificate, truncated, too_large, redirect,
            other_model, http_CODE, content_type, or a kind of `wire.AnswerError`.
        words: what happened, for messages; without secrets.
        again: whether another try may succeed.
        rest_s: the server's Retry-After.
    """

    def __init__(self, kind: str, words: str, again: bool = True, rest_s: float | None = None) -> None:
        super().__init__(words)
        self.kind, self.again, self.rest_s = kind, again, rest_s


@dataclass(frozen=True)
class Access:
    """Settings of the connections to all servers."""

    token: SecretStr | None
    allow_hosts: tuple[str, ...]
    timeout_s: float
    """Longest wait for one answer."""
    tls: ssl.SSLContext


class Server:
    """A server by its URL."""

    def __init__(self, url: str, access: Access, connections: int) -> None:
        self.url = url
        self.breaker = Breaker()
        self.outstanding = 0
        """Requests under way."""
        self._access = access
        self._unreachable = 0
        """How often a connection to an address failed: selects one of several addresses."""
        self._client = httpx.AsyncClient(
            verify=access.tls, trust_env=False, follow_redirects=False,
            timeout=httpx.Timeout(access.timeout_s, connect=min(CONNECT_TIMEOUT_S, access.timeout_s)),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=KEEPALIVE_S),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, *,
                  most_bytes: int) -> bytes:
        """The body of a JSON answer with status 200.

        Raises:
            FailedTry: there is no answer within the time limit, or an invalid one.
        """
        try:
            async with asyncio.timeout(self._access.timeout_s):
                return await self._ask(method, path, body, headers or {}, most_bytes)
        except TimeoutError:
            raise FailedTry("timeout", f"no answer within {self._access.timeout_s:g} s") from None
        except httpx.TimeoutException as error:
            raise FailedTry("timeout", f"no connection or answer in time ({type(error).__name__})") from None
        except ForbiddenAddressError as error:
            raise FailedTry("address", str(error), again=False) from None
        except httpx.InvalidURL as error:
            raise FailedTry("address", f"its URL is invalid: {error}", again=False) from None
        except (OSError, UnicodeError) as error:
            raise FailedTry("dns", f"its name cannot be resolved: {error}") from None
        except httpx.TransportError as error:
            untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
            raise FailedTry("certificate" if untrusted else "connection",
                            self._redacted(f"{type(error).__name__}: {error}"), again=not untrusted) from None

    async def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str], most_bytes: int) -> bytes:
        turn = self._unreachable
        request = await self._request(method, path, body, headers)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            self._unreachable = turn + 1  # the next try goes to the next address, as localhost may be ::1 or 127.0.0.1
            raise
        try:
            try:
                content = await _content(response, most_bytes)
            except httpx.RemoteProtocolError as error:
                raise FailedTry("truncated", f"the answer is incomplete: {error}") from None
        finally:
            await response.aclose()
        self._check(response, content)
        return content

    async def _request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> httpx.Request:
        """A request to the checked address, with the host's name in the headers and in the TLS handshake, so that
        virtual hosts and certificates work."""
        url = httpx.URL(self.url.rstrip("/") + path)
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await resolve(url.host, port, self._access.allow_hosts)
        pinned = url.copy_with(host=addresses[self._unreachable % len(addresses)])
        headers |= {"Host": url.netloc.decode(), "Accept": "application/json", "Accept-Encoding": "identity",
                    "User-Agent": "rlhf-ray"}
        if body:
            headers["Content-Type"] = "application/json"
        if self._access.token:
            headers["Authorization"] = f"Bearer {self._access.token.get_secret_value()}"
        return self._client.build_request(method, pinned, content=body or None, headers=headers,
                                          extensions={"sni_hostname": url.host})

    def _check(self, response: httpx.Response, content: bytes) -> None:
        """Raise unless the response is JSON with status 200."""
        status, rest = response.status_code, None
        if 300 <= status < 400:
            raise FailedTry("redirect", f"it answers {status}, a redirect, which is not followed: set urls to the "
                            "final address of the service", again=False)
        if status != 200:
            again = status in (408, 429) or status >= 500
            if status in (429, 503):
                rest = _seconds(response.headers.get("Retry-After"))
            hint = "; check the token" if status in (401, 403) else ""
            raise FailedTry(f"http_{status}", f"it answers {status}: {self._excerpt(content)}{hint}", again, rest)
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or response.headers.get("Content-Encoding", "identity") != "identity":
            raise FailedTry("content_type", f"it answers with {kind or 'no content type'!r} instead of plain "
                            f"application/json: {self._excerpt(content)}")

    def _excerpt(self, content: bytes) -> str:
        """The beginning of an answer as printable text on one line, with the token masked."""
        return self._redacted(" ".join(content.decode("utf-8", "replace").split()))[:EXCERPT]

    def _redacted(self, text: str) -> str:
        token = self._access.token.get_secret_value() if self._access.token else ""
        text = text.replace(token, "***") if token else text
        return re.sub(r"[^\x20-\x7e\u00a0-\ud7ff]", "?", text)


async def _content(response: httpx.Response, most_bytes: int) -> bytes:
    """The body, if it is not too large."""
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > most_bytes:
            raise FailedTry("too_large", f"the answer is larger than {most_bytes} bytes")
    return bytes(content)


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds (RFC 9110, 10.2.3: a number or a date), at most LONGEST_REST_S; None without one."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after) if retry_after.strip().isdigit() else (
            parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
    return min(max(seconds, 0.0), LONGEST_REST_S)
