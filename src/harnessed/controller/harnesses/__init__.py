"""Presets: one module for each harness that Harnessed knows by name. Called by launch.py and in warm templates."""
