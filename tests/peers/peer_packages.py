"""verl and TRL, fetched once from their registry: `make peers`. Run with the folder to fill.

Without their dependencies, which would be gigabytes: what their formulas import is in the environment already, is
listed here, or (ray) is never called by a formula and stands in as an empty module (conftest.py). The folder is beside
the environment, not in it: only the tests of this folder look into it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / ".cache" / "peers"
PACKAGES = """
    verl==0.9.1 trl==1.16.0 tensordict==0.10.0 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 pyvers==0.2.3
    lazy-importer==0.1.0 cloudpickle==3.1.3 importlib-metadata==10.2.0 zipp==4.1.2
""".split()


def fetch(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Filled beside its place and renamed, so that a folder that exists is complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        filled = Path(scratch, "peers")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", filled, *PACKAGES], check=True, timeout=600)
        filled.rename(folder)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
