"""A shop whose prices only a tool knows. The public methods of the class are the tools that the model may call."""


class Shop:
    """One episode: `reset` is given columns of the row; the reward is 1 if the right sum was submitted."""

    def reset(self, prices: dict[str, int], answer: int) -> None:
        self.prices = prices
        self.answer = answer
        self.submitted: int | None = None

    def lookup(self, item: str) -> int:
        """Price.

        Args:
            item: Name.
        """
        return self.prices[item]

    def calculator(self, expression: str) -> int:
        """Sum.

        Args:
            expression: 1+2
        """
        return sum(int(number) for number in expression.split("+"))

    def submit(self, answer: int) -> str:
        """Answer.

        Args:
            answer: Sum.
        """
        self.submitted = answer
        return "ok"

    def get_reward(self) -> float:
        return float(self.submitted == self.answer)
