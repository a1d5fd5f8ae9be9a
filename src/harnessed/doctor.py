"""`harnessed doctor --model PATH`: what a policy's tokenizer and chat template do. Used by cli.py."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harnessed.gateway.examine import examine
from harnessed.gateway.template import ChatTemplate
from harnessed.records import Verdict


def report(model: Path) -> int:
    """Exit status: 1 if the context after an answer is not well defined in some case. Raises ConfigError."""
    template = ChatTemplate(model)
    examination = examine(template)
    table = Table("case", "verdict", "")
    for finding in examination.findings:
        table.add_row(finding.case, finding.verdict, finding.detail)
    console = Console(highlight=False)
    console.print(f"tokenizer: {template.size} tokens; context: {_context(model)}", markup=False)
    console.print("stop tokens:", ", ".join(template.written([id]) for id in template.stop_ids), markup=False)
    console.print("tool calls: delivered as the text that the model wrote; there is no parser yet", markup=False)
    console.print(table)
    return 1 if examination.cases(Verdict.BROKEN) else 0


def _context(model: Path) -> str:
    config = model / "config.json"
    longest = json.loads(config.read_bytes()).get("max_position_embeddings") if config.is_file() else None
    return f"{longest} tokens" if longest else "config.json does not say"
