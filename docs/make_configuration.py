"""Writes docs/configuration.md from the settings in `harnessed.config`, so that the page cannot go stale.

`make docs` runs it; tests/test_docs.py compares.
"""

import ast
import inspect
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harnessed import config

HEAD = """# Configuration

`harnessed train my.yaml trainer.steps=5` reads `my.yaml` and overrides one setting. Relative paths are relative to the
configuration file, those of overrides to the current folder (task files always to the configuration file);
`module:function` names a function in a module that lies beside the file or is installed. A name that does not exist is
an error that names the nearest one.

This page is made from `src/harnessed/config.py` by `make docs`.
"""


def page() -> str:
    parts = [HEAD]
    for section, field in config.Config.model_fields.items():
        parts.append(f"\n## {section}\n")
        if notes := _class_notes(field.annotation):
            parts.append(f"{notes}\n")
        parts += ["| setting | default | meaning |", "| --- | --- | --- |", *_rows(section, field.annotation), ""]
    return "\n".join(parts)


def _rows(prefix: str, section: Any) -> list[str]:
    rows, notes = [], _field_notes(section)
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}"
        inner = _section_in(field.annotation)
        if inner is None or inner is not field.annotation:
            meaning = notes.get(name, "").replace("|", "\\|")
            rows.append(f"| `{path}` | {_default(field.default)} | {meaning} |")
        if inner is not None:
            rows += _rows(path, inner)
    return rows


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting is, or may be: `Lora | None` has the settings of Lora."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else [annotation]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "" if value is None else f"`{list(value) if isinstance(value, tuple) else value}`"


def _class_notes(section: Any) -> str:
    own = section.__dict__.get("__doc__") or ""
    return " ".join(own.split())


def _field_notes(section: Any) -> dict[str, str]:
    """The docstring under each field of a class."""
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    notes = {}
    for field, note in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            notes[field.target.id] = " ".join(str(note.value.value).split())
    return notes


if __name__ == "__main__":
    (Path(__file__).parent / "configuration.md").write_text(page(), encoding="utf-8")
