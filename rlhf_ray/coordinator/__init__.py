"""The training loop: rollouts, updates, publications. The coordinator handles references and small numbers only."""
