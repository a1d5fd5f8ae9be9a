"""A configuration from its YAML file and dotted overrides. Called by the command line only.

What is wrong with it is one `ConfigError` whose text names the setting, its value and the nearest right name.
"""

import difflib
import sys
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import AfterValidator, ValidationError

from harnessed.config import Config, ConfigError, beside_the_configuration, hide_passwords


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a configuration and apply overrides such as `trainer.steps=5` (values are YAML).

    Paths in overrides are relative to the current folder, as a shell user expects; task files and modules are found
    beside the configuration, whose folder becomes importable. Raises ConfigError.
    """
    tree = _read_yaml(path)
    for override in overrides or []:
        _apply(tree, override)
    base = path.resolve().parent
    try:
        config = Config.model_validate(tree, context={"base": base})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from None
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    return config


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {hide_passwords(' '.join(str(error).split()))}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, such as `policy:` and `tasks:`")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {hide_passwords(override)!r} is not of the form section.setting=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {hide_passwords(override)!r}: the value is not YAML") from None
    if isinstance(value, str) and _is_path(keys):
        value = str(Path.cwd() / value)
    for key in keys[:-1]:
        child = tree[key] = {} if tree.get(key) is None else tree[key]  # `lora: null` is a section that is off
        if not isinstance(child, dict):
            raise ConfigError(f"override {hide_passwords(override)!r}: {key} is a value, not a section")
        tree = child
    tree[keys[-1]] = value


def _is_path(keys: list[str]) -> bool:
    field: Any = Config
    for key in keys:
        field = _section(field).get(key)
        if field is None:
            return False
        metadata, field = list(field.metadata), field.annotation
        metadata += [m for arm in typing.get_args(field) for m in getattr(arm, "__metadata__", ())]
        if any(isinstance(m, AfterValidator) and m.func is beside_the_configuration for m in metadata):
            return True
    return False


def _section(annotation: Any) -> dict[str, Any]:
    """The fields of a section's class; empty where the annotation is a plain value."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next((arm for arm in typing.get_args(annotation) if hasattr(arm, "model_fields")), None)
    return dict(getattr(annotation, "model_fields", {}))


def _explain(error: ValidationError) -> str:
    """The first fault as one line: the setting, what is wrong with it, and the nearest right name if it is unknown."""
    fault = error.errors()[0]
    keys = [str(key) for key in fault["loc"]]
    name = ".".join(keys)
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {name}{_nearest(keys)}"
    if fault["type"] == "missing":
        return f"the setting {name} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "string_pattern_mismatch":
        message = "must have the form " + ("module:function" if "function" in name else fault["ctx"]["pattern"])
    return (
        f"{name}: {message}, got {hide_passwords(repr(fault['input']))}" if fault["type"] != "value_error" else message
    )


def _nearest(keys: list[str]) -> str:
    fields: dict[str, Any] = Config.model_fields
    for key in keys[:-1]:
        fields = _section(fields[key].annotation)
    close = difflib.get_close_matches(keys[-1], fields, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {'.'.join([*keys[:-1], close[0]])}?"
    return f"; known here: {', '.join(fields)}"
