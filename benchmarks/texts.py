"""What the agents of a benchmark read and write: source of the standard library, as coding agents do."""

import argparse
import ast
import asyncio.tasks
import inspect
import typing


def source() -> str:
    """About 300 KB."""
    return "".join(inspect.getsource(module) for module in (argparse, typing, ast, asyncio.tasks))
