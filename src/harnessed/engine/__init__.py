"""The small inference engine that a run uses when it is given no server: a process of its own, see `serve.py`."""
