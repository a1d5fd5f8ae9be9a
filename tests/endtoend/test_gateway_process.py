"""`harnessed gateway` as a process of its own."""

import importlib.util
import sqlite3
import subprocess
from pathlib import Path

import httpx
from command import HARNESSED, environment, make_config, wait_for
from scripted_engine import ScriptedEngine

from harnessed.client import Client, claim, create_groups, create_run, register_engine
from harnessed.records import EngineSpec, GroupSpec, RunSpec


def test_a_gateway_serves_a_call_without_ever_loading_torch(tmp_path):
    """Torch is installed here; the gateway must not pay for it."""
    assert importlib.util.find_spec("torch")
    config, folder = make_config(tmp_path), tmp_path / "run"
    with (
        subprocess.Popen(
            [*HARNESSED, "gateway", config, f"run.folder={folder}"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process,
        ScriptedEngine(lambda prompt, call: [72, 105, 258]) as engine,
    ):
        try:
            url = process.stderr.readline().split()[3].rstrip(";")
            wait_for(lambda: (folder / "admin.key").exists(), "the admin key")
            gateway = Client(url, (folder / "admin.key").read_text())
            gateway(create_run(RunSpec(id="r", policy=str(tmp_path / "policy"))))
            gateway(register_engine(EngineSpec(id="e", url=engine.url, run="r")))
            gateway(create_groups([GroupSpec(id="g", run="r", task={}, n=1)]))
            (attempt,) = gateway(claim("r", "me", 1, 1))
            response = httpx.post(
                f"{url}/v1/chat/completions",
                headers={"authorization": f"Bearer {attempt.key}"},
                json={"messages": [{"role": "user", "content": "hi"}]},
            )
            assert response.status_code == 200
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            process.terminate()
        assert process.wait(10) == 0
    # It closed its store: all is in one file, also what nobody waited for.
    assert [file.name for file in folder.glob("gateway.db*")] == ["gateway.db"]
    with sqlite3.connect(folder / "gateway.db") as database:
        assert database.execute("select delivered from nodes").fetchall() == [(1,)]
    loaded = {line.rpartition("/")[2] for line in maps.splitlines() if "/" in line}
    assert any("tokenizers" in name for name in loaded)
    assert not any("torch" in name for name in loaded)
