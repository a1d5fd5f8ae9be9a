"""Benchmarks take minutes and run on demand: here it is held that they still fit the code that they measure."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_benchmark_can_be_started():
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "gateway" in names
    program = f"import {', '.join(names)}"
    started = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, timeout=120, check=False
    )
    assert started.returncode == 0, started.stderr
