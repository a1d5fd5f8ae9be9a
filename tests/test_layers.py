"""The import rule of the house: which part may know which, relative imports included."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "harnessed"
SHARED = {"records", "config", "client"}
ALLOWED = {
    "__init__": set(),
    "__main__": {"cli"},
    "records": set(),
    "config": {"records"},
    "client": {"records"},
    "loading": {"config"},
    "logs": set(),
    "waiting": {"records"},
    "weights": {"records"},
    "services": {"config"},
    "resuming": {"config", "records", "training"},
    "gateway": SHARED,
    "controller": SHARED,
    "training": SHARED | {"waiting", "weights"},
    "engine": {"records", "config", "weights"},
    "browse": {"*"},
    "run": {"*"},
    "up": {"*"},
    "doctor": {"*"},
    "cli": {"*"},
}


def imported(path: Path, source: Path = SOURCE) -> set[str]:
    """Parts of the project that a module imports."""
    package = ["harnessed", *path.relative_to(source).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("harnessed.")}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_its_part_may_know(path):
    allowed = ALLOWED[part_of(path)]
    if "*" in allowed:
        return
    strangers = imported(path) - allowed - {part_of(path)} - {"__version__"}
    assert not strangers, f"{path.name} must not know {strangers}"


def test_relative_imports_do_not_slip_through(tmp_path):
    module = tmp_path / "gateway" / "wire" / "chat.py"
    module.parent.mkdir(parents=True)
    module.write_text("from ...training import losses\nfrom ... import engine\nfrom . import turn\n")
    assert imported(module, tmp_path) == {"training", "engine", "gateway"}


def test_torch_and_transformers_stay_out_of_gateway_and_controller():
    for part in ("gateway", "controller"):
        for path in (SOURCE / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] in ("torch", "transformers") for name in names), path


def test_a_command_imports_what_it_needs_and_not_what_another_one_does():
    """Each service of a run is a command that is waited for."""
    needless = ("torch", "transformers", "sqlalchemy", "alembic", "aiohttp", "uvicorn")
    script = f"import sys, harnessed.cli; print(*(name for name in {needless} if name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == ""
