"""docs/sdk.md, run as it is written, against a gateway in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

from command import HARNESSED, environment, make_config, wait_for
from scripted_engine import ScriptedEngine
from texts import answer

PAGE = Path(__file__).parent.parent / "docs" / "sdk.md"


def test_the_page_works_as_written(tmp_path):
    for name, content in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        (tmp_path / name).write_text(content)
    config, folder = make_config(tmp_path), tmp_path / "run"
    words = ["red", "or", "blue", "or"]
    with (
        subprocess.Popen([*HARNESSED, "gateway", config, f"run.folder={folder}"], env=environment()) as gateway,
        ScriptedEngine(lambda prompt, call: answer(words[call % 4])) as engine,
    ):
        try:
            key = folder / "admin.key"
            wait_for(lambda: key.exists() and key.read_text(), "the gateway's key")
            example = subprocess.run(
                [
                    *(sys.executable, "example.py", (folder / "gateway.url").read_text(), key.read_text()),
                    *(engine.url, tmp_path / "policy"),
                ],
                cwd=tmp_path,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            gateway.terminate()
    assert example.returncode == 0, example.stdout + example.stderr
    lines = example.stdout.splitlines()
    assert lines[0] == "engine: True" and lines[1:5] == ["ok"] * 4
    assert lines[5:7] == ["turnstile: closed with 0 in flight", "turnstile: open"]
    assert sum(" after #" in line for line in lines) == len(engine.log) == 8
    assert sum(line.endswith("complete: True") for line in lines) == 2
    assert f"calls: 8 sampled tokens: {engine.sampled_tokens} lost: 0" in lines
