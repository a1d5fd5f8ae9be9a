"""What benchmarks measure, as a table with limits."""

import math
import sys
from dataclasses import dataclass
from typing import NoReturn

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    """With its unit."""
    value: float
    limit: float
    """At most; infinite: there is none."""
    baseline: str = ""
    """The same work done in another way, in the same run."""

    @property
    def held(self) -> bool:
        return self.value <= self.limit

    def row(self) -> tuple[str, str, str, str, str]:
        if math.isinf(self.limit):
            return self.what, f"{self.value:.3g}", "", self.baseline, ""
        return self.what, f"{self.value:.3g}", f"{self.limit:.3g}", self.baseline, "held" if self.held else "OVER"


def tell(figures: list[Figure], title: str = "figure") -> NoReturn:
    """Print them, and end with status 1 if one is over its limit."""
    table = Table(title, "measured", "at most", "baseline", "")
    for figure in figures:
        table.add_row(*figure.row())
    Console(width=160, highlight=False).print(table)
    sys.exit(not all(figure.held for figure in figures))
