"""The loop: prompts out, experience in, updates, weights back. It handles references and small numbers only."""
