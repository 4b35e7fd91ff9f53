"""Environments: what a policy acts in over several turns. Tools, classes with tools, and environments in messages."""
