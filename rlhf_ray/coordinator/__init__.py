"""The training loop: rollouts, updates, publications. The coordinator handles references and small numbers only.

Begin at `loop.Coordinator._step`, one step of training, and `pipeline.Pipeline._produce`, what happens to one chunk.
"""
