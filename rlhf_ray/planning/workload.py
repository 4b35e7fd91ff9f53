"""What one update works on: how many samples, how long, and how unequal their lengths are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One batch. Response lengths t have the survivor function S(t) = (1 - t / (tail * response)) ** (tail - 1): a Beta
    distribution whose mean is `response` and which ends at `tail` times it. A tail of 2 is uniform from 0; with 1 all
    are equal."""

    samples: int = 2048
    """Of one update."""
    prompt: int = 512
    """Tokens."""
    response: int = 1024
    """Mean tokens."""
    tail: float = 4.0
    """Longest response over the mean."""
    mini_batches: int = 4
    """Optimizer steps of an epoch; 512 samples each by default (as Yu et al. 2025, DAPO, section 4.1)."""
    epochs: int = 1

    @property
    def row(self) -> int:
        """Mean tokens of a sample."""
        return self.prompt + self.response

    def survivors(self, t: float) -> float:
        """Share of responses longer than `t` tokens."""
        return (1 - t / (self.tail * self.response)) ** (self.tail - 1) if t < self.tail * self.response else 0.0

    @property
    def longest(self) -> float:
        """Tokens of a batch's longest response: where one sample of the batch is expected to be left."""
        if self.tail == 1:
            return self.response
        return self.tail * self.response * (1 - (1 / self.samples) ** (1 / (self.tail - 1)))

    @property
    def held(self) -> float:
        """Mean tokens that a sample under way has in the cache: its prompt, and what it has of its response. Long ones
        are under way longer: the integral of t S(t) over that of S(t) is tail * response / (tail + 1)."""
        return self.prompt + self.tail * self.response / (self.tail + 1)
