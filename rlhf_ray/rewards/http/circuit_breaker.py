"""A circuit breaker for one server, which also respects Retry-After. Times are seconds of one clock."""

FAILURES = 5
"""Failures in a row that open the breaker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0


class Breaker:
    """Closed: requests pass. Open: none do, for a pause that doubles. After a pause one request tries the server; its
    success closes the breaker, its failure opens it again."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause = FIRST_PAUSE_S
        self._closed_until = 0.0
        self._rest_until = 0.0
        self._open = False
        self._trying = False

    def wait(self, now: float) -> float:
        """Seconds until a request may pass; 0 when one may now. Infinite while another request tries the server."""
        if self._open and self._trying:
            return float("inf")
        return max(0.0, self._rest_until - now, self._closed_until - now if self._open else 0.0)

    def begin(self) -> None:
        """A request starts."""
        self._trying = self._open

    def succeeded(self) -> None:
        """The request succeeded."""
        self._failures, self._pause, self._open, self._trying = 0, FIRST_PAUSE_S, False, False

    def failed(self, now: float) -> None:
        """The request failed."""
        self._failures += 1
        if self._trying or (not self._open and self._failures >= FAILURES):
            self._open, self._trying = True, False
            self._closed_until = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def cancelled(self) -> None:
        """The request was cancelled, which says nothing about the server."""
        self._trying = False

    def rest(self, until: float) -> None:
        """The server sent Retry-After. It is alive, so the breaker closes."""
        self.succeeded()
        self._rest_until = max(self._rest_until, until)
