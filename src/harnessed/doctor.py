"""`harnessed doctor --model PATH`: what a policy's tokenizer and chat template do. Used by cli.py."""

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
    console.print("stop tokens:", ", ".join(template.token(id) for id in template.stop_ids), markup=False)
    console.print(table)
    return 1 if examination.cases(Verdict.BROKEN) else 0
