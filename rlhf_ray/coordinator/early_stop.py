"""Early stopping: the KL from the reference is too high, or the reward has collapsed, for several consecutive steps."""

from dataclasses import dataclass, field
from typing import Any

from rlhf_ray.config.training_loop import MAX_PATIENCE, EarlyStopConfig


@dataclass
class EarlyStop:
    """Checks two metrics of every step. Its state has as many of them as the longest patience needs and no verdict, so
    that a resumed run is checked against its present limits as if it had had them from the start."""

    config: EarlyStopConfig
    step: int = 0
    """The last step."""
    kl: list[float] = field(default_factory=list)
    """Mean sequence KL of the last `MAX_PATIENCE` steps, in nats; empty without a reference."""
    reward: list[float] = field(default_factory=list)
    """Mean reward of the last `MAX_PATIENCE` steps."""
    start: list[float] = field(default_factory=list)
    """Mean reward of the run's first `MAX_PATIENCE` steps."""

    def observe(self, step: int, kl: float | None, reward: float) -> None:
        """Add the metrics of a finished step; `kl` is None without a reference."""
        self.step = step
        self.kl = [] if kl is None else [*self.kl, kl][-MAX_PATIENCE:]
        self.reward = [*self.reward, reward][-MAX_PATIENCE:]
        self.start = [*self.start, reward][:MAX_PATIENCE]

    def reason(self) -> str | None:
        """Why the run should end: metric, value, limit and steps; None to continue."""
        return self._kl_blew_up() or self._reward_collapsed()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return {"step": self.step, "kl": self.kl, "reward": self.reward, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.step = state["step"]
        self.kl, self.reward, self.start = (list(state[name]) for name in ("kl", "reward", "start"))

    def _kl_blew_up(self) -> str | None:
        limit = self.config.kl_above
        if limit is None or not self._all_over([kl <= limit for kl in self.kl]):
            return None
        return (f"kl/sequence was above early_stop.kl_above={limit:g} nats {self._when()}, and {self.kl[-1]:.4g} in "
                "the last")

    def _reward_collapsed(self) -> str | None:
        drop = self.config.reward_below_start
        if drop is None or not self.start:
            return None
        start = self.start[: self.config.patience]
        begun = sum(start) / len(start)
        if not self._all_over([reward >= begun - drop for reward in self.reward]):
            return None
        return (f"reward/mean was more than early_stop.reward_below_start={drop:g} below its start of {begun:.4g} "
                f"{self._when()}, and {self.reward[-1]:.4g} in the last")

    def _all_over(self, within: list[bool]) -> bool:
        """Whether the last `patience` steps were all over the limit. NaN exceeds every limit."""
        last = within[-self.config.patience :]
        return len(last) == self.config.patience and not any(last)

    def _when(self) -> str:
        first = self.step - self.config.patience + 1
        return f"in step {self.step}" if first == self.step else f"in each of the steps {first} to {self.step}"
