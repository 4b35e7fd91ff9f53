"""PPO with TRL's trainer and with ours, on one task, in turns.

`trl_run` is executed by TRL's own environment and imports nothing of this project; the other modules are ours.
"""
