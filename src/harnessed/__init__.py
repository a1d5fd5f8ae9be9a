"""Harnessed: reinforcement learning of the model behind an AI agent, through the harness that ships."""

__version__ = "0.1.0"
