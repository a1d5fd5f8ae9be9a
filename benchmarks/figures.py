"""One line of a benchmark's table."""

import math
from dataclasses import dataclass


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
