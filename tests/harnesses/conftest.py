"""The tests of this folder share a gateway with a scripted engine."""

from house import house  # noqa: F401
