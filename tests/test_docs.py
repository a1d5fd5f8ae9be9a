"""What the documents say of the code holds."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_of_settings_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text() == module.page(), "run `make docs`"


def test_files_that_the_documents_name_exist():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for name in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / name).exists(), f"{document.name} points to {name}"
