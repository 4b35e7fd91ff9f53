"""An environment of tests in messages: what it answers follows from its seed and from what the policy wrote."""

import random
import time

STEP_S = 0.02
"""A step takes so long: faults meet episodes under way."""


class Talk:
    """Answers in the role and for as many turns as the row says."""

    def reset(self, row, seed):
        """Begin with a number of the seed's."""
        self.row = row
        self.random = random.Random(seed)
        self.turn = 0
        return {"messages": [{"role": "user", "content": f"say {row['number']} {self.random.randrange(100)}"}]}

    def step(self, reply):
        """Count what the policy wrote."""
        self.turn += 1
        time.sleep(STEP_S)
        content = f"{self.turn}: {len(reply.text)} {self.random.randrange(100)}"
        message = {"role": self.row["role"], "content": content}
        if message["role"] == "tool":
            message |= {"name": "count", "tool_call_id": f"{self.turn:09}"}
        return {"messages": [message], "reward": self.turn / 4, "done": self.turn >= self.row["turns"],
                "info": {"written": len(reply.text)}}


class TalkOnce(Talk):
    """The same, which says that it cannot be replayed."""

    replayable = False
