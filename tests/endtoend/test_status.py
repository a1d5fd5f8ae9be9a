"""`harnessed status` and the lines that a gateway logs, with a gateway in a process of its own."""

import json
import subprocess
from contextlib import contextmanager

import httpx
from command import HARNESSED, environment, harnessed, make_config, wait_for
from scripted_engine import ScriptedEngine

from harnessed.client import Client, claim, close_turnstile, create_groups, create_run, register_engine
from harnessed.records import CloseMode, EngineSpec, GroupSpec, RunSpec


@contextmanager
def served(tmp_path, **gateway):
    """A gateway process with a run that has work: its configuration, folder, and error output once it has ended."""
    config, folder = make_config(tmp_path, gateway=gateway), tmp_path / "run"
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen([*HARNESSED, "gateway", config, f"run.folder={folder}"], stderr=file, env=environment()) as it,
    ):
        try:
            wait_for(
                lambda: (folder / "admin.key").exists() and (folder / "admin.key").read_text(), "the gateway's key"
            )
            yield config, folder, errors
        finally:
            it.terminate()


def test_status_tells_who_waits_and_whether_the_gateway_is_ready(tmp_path):
    with served(tmp_path) as (_, folder, _):
        url = (folder / "gateway.url").read_text()
        with Client(url, (folder / "admin.key").read_text()) as gateway:
            gateway(create_run(RunSpec(id="r-1", policy=str(tmp_path / "policy"))))
            ready = harnessed("status", folder)
            assert ready.returncode == 0 and ready.stdout.startswith("ready\n"), ready.stdout + ready.stderr
            with ScriptedEngine(lambda prompt, call: [72, 105, 258]) as engine:
                gateway(register_engine(EngineSpec(id="e-1", url=engine.url, run="r-1")))
                gateway(create_groups([GroupSpec(id="g", run="r-1", task={}, n=3)]))
                gateway(claim("r-1", "controller-1", 1, 1))
            gateway(close_turnstile("r-1", "trainer-1", CloseMode.FINISH, lease_s=0.001))
        wait_for(lambda: harnessed("status", folder).returncode == 1, "the gateway to ask its engine again")
        away = harnessed("status", folder)
        assert away.stdout.startswith("not ready: run r-1 has no healthy engine: e-1 says")
        says = away.stdout.splitlines()[1]
        # What stands still is said before what merely works.
        assert says.startswith("r-1: turnstile closed for ") and "s by trainer-1, whose lease is over for " in says
        assert "; engine e-1 not healthy for " in says and "; controller: 2 queued, longest " in says
        lines = [line.split() for line in away.stdout.splitlines()]
        assert ["r-1", "2", "1", "0", "0", "0"] in lines
        assert any(line[:4] == ["controller-1", "1", *line[2:3], "s"] and line[-2:] == ["-", "-"] for line in lines)
        assert any(line[:3] == ["r-1", "closed", "trainer-1"] and "over" in line for line in lines)
        key = (folder / "admin.key").read_text()
        by_url = harnessed("status", "--url", url, env=environment(HARNESSED_ADMIN_KEY=key))
        assert by_url.returncode == 1 and "controller-1" in by_url.stdout
        assert "HARNESSED_ADMIN_KEY" in harnessed("status", "--url", url).stderr
    gone = harnessed("status", folder)
    assert gone.returncode == 1 and "did not answer" in gone.stderr
    assert harnessed("status", tmp_path).returncode == 2


def test_with_the_setting_each_line_of_a_gateway_is_a_json_object(tmp_path):
    with served(tmp_path, log="json") as (config, folder, errors):
        url = (folder / "gateway.url").read_text()
        wait_for(lambda: errors.read_text().count("\n") == 1, "its first line")
        assert httpx.post(f"{url}/a/sk-hd.attempt.mine/v1/messages", json={}).status_code == 401
        bound = subprocess.run(
            [
                *HARNESSED,
                "gateway",
                config,
                f"gateway.port={url.rpartition(':')[2]}",
                f"run.folder={tmp_path / 'other'}",
            ],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
    first, refused = map(json.loads, errors.read_text().splitlines())
    assert first["message"].startswith(f"gateway on {url}; its admin key")
    assert (refused["logger"], refused["level"]) == ("harnessed.gateway.calls", "info")
    assert refused["message"].startswith("refused with 401") and "sk-hd" not in errors.read_text()
    assert bound.returncode == 2 and "cannot listen" in json.loads(bound.stderr)["message"]
