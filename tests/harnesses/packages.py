"""Real harnesses, fetched once from npm: `make harnesses`.

Run with the folder to fill. Tests of this folder are skipped where it is missing.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / ".cache" / "harnesses"
PACKAGES = ["@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0", "opencode-ai@1.18.33"]


def fetch(folder: Path) -> None:
    if shutil.which("npm") is None:
        sys.exit("harnesses: npm is missing; install it (Debian: apt-get install npm)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Filled beside its place and renamed, so that a folder that exists is complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        filled = Path(scratch, "harnesses")
        filled.mkdir()
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(filled), *PACKAGES]
        subprocess.run(command, check=True, timeout=300)
        filled.rename(folder)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
