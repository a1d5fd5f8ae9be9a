"""Fails unless the demo's run learned what it should and its books balance. Called by .ci/run with the run's folder."""

import json
import sys
from pathlib import Path

summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
fates, sampled = sum(summary["fates"].values()), summary["sampled_tokens"]
expectations = {
    "held-out success before training is at most 0.40": summary["held_out_before"] <= 0.40,
    "held-out success after training is at least 0.85": summary["held_out_after"] >= 0.85,
    "every sampled token has a fate": fates == sampled,
    "the engine counted the same tokens": summary["engine_sampled_tokens"] == sampled,
}
for text, holds in expectations.items():
    print(f"{'ok    ' if holds else 'FAILED'} {text}")
sys.exit(not all(expectations.values()))
