"""PPO from human feedback on Ray."""
