"""docs/your-agent.md, run as it is written."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from policies import add_model, make_policy

PAGE = Path(__file__).parent.parent / "docs" / "your-agent.md"


def test_the_page_works_as_written(tmp_path):
    page = PAGE.read_text()
    for name, content in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page, re.M | re.S):
        (tmp_path / name).write_text(content)
    (command,) = re.findall(r"^harnessed train .*$", page, re.M)
    model = add_model(make_policy(tmp_path / "model"))
    harnessed = Path(sys.executable).with_name("harnessed")
    result = subprocess.run(
        shlex.split(command.replace("/models/mine", str(model)).replace("harnessed", str(harnessed), 1)),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert summary["outcomes"] == {"ok": 2 * 12 + 2 * 3}
    assert summary["trained_tokens"] > 0
    assert sum(summary["fates"].values()) == summary["sampled_tokens"] == summary["engine_sampled_tokens"]
    assert (tmp_path / "runs" / "first" / summary["checkpoint"] / "model.safetensors").is_file()
