"""Saved samples of two episodes: one of three turns in two segments, one that is masked because a tool hung."""

import numpy as np

from rlhf_ray.observability.sample_files import SampleTexts, SampleWriter, sample_table
from rlhf_ray.records import Episode, Experience, SampleKey, Turn, offsets_of

QUESTION = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "What do 3 teas cost?"}]
TOOLS = [{"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
         for name in ("look_up", "calculate")]
TOKENS = dict(enumerate(["<user>", "teas", "?", "Let me look. ", "look_up", "<tool>", " 4", "3", "*4", "=12",
                         "They cost 12."]))
ROWS = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 5, 9, 10], [0, 1, 2, 3, 4, 5]]
"""Token ids of each segment."""
SAMPLED = [[0, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0]]
KEYS = [SampleKey(0, 4, 0), SampleKey(0, 4, 1)]
LOGPROBS = [-0.5, -0.25, -1.5, -2.0, -0.125, -0.75, -3.0]
"""Of the sampled tokens: four of the first segment, one of the second, two of the other episode."""
EPISODES = [
    Episode("shop", "completed", "train", QUESTION, TOOLS, [
        Turn(0, 3, 5, 11, "stop", [{"name": "look_up", "arguments": {"item": "tea"}}],
             [{"role": "tool", "name": "look_up", "content": "4"}]),
        Turn(0, 7, 9, 12, "stop", [{"error": "'3*4' is no JSON"}, {"name": "calculate", "arguments": {"text": "3*4"}}],
             [{"role": "user", "content": "a call was not JSON"}, {"role": "tool", "content": "12"}], reward=0.25),
        Turn(1, 5, 6, 13, "stop", reward=0.75),
    ], metrics={"items": 1.0}, events={"parse_failures": 1}),
    Episode("shop", "error_timeout", "mask", QUESTION, TOOLS, [
        Turn(0, 3, 5, 21, "length", [{"name": "look_up", "arguments": {"item": "tea"}}], []),
    ], events={"interrupted": 1, "tool_failures": 0}, error="the tool look_up did not answer within 60 s\x1b[0m"),
]
TURNS = [["Let me look. look_up", "3*4", "They cost 12."], ["Let me look. look_up"]]
TEXTS = SampleTexts(["<user>teas?"] * 2, [None, None], ["\n".join(texts) for texts in TURNS], TOKENS, TURNS)


def experience_of_episodes():
    """Log-probabilities of the learner are 0.125 lower than the generator's; the masked episode has no advantages."""
    mask = np.array([bool(sampled) for row in SAMPLED for sampled in row])

    def column(values, rest=0, kind=np.float32):
        whole = np.full(len(mask), rest, kind)
        whole[mask] = values
        return whole

    return Experience(
        offsets_of([len(row) for row in ROWS]), np.array([token for row in ROWS for token in row], np.int32), mask,
        column(LOGPROBS), column(np.array(LOGPROBS) - 0.125), None, None, column([0.5, 0.5, 0.5, 0.5, 0.75, 0, 0]),
        column(0), KEYS, samples=np.array([0, 0, 1]), versions=column([3, 3, 3, 3, 4, 3, 3], -1, np.int32),
        finish_reasons=["stop", "stop", "length"], episodes=EPISODES)


def save_episodes(run, step=1, scores=(1.0, np.nan)):
    """The file of a step."""
    numbers = {"score": np.array(scores, np.float32), "reward/environment": np.array(scores, np.float32), "kl": None,
               "gold": None}
    SampleWriter(run / "samples").write(step, sample_table(step, experience_of_episodes(), TEXTS, numbers))
