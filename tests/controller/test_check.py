"""A configuration that cannot work is one clear line before anything starts."""

import importlib.util

import pytest
from controller_runs import make_config

from harnessed.config import ConfigError
from harnessed.controller import fence
from harnessed.controller.check import check


def test_what_works_passes() -> None:
    check(make_config())
    check(make_config(harness={"kind": "command", "command": ["sh", "-c", "true"]}, evaluator={"command": ["sh"]}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"harness": {"kind": "python", "function": "no_such:f"}}, "harness.function is 'no_such:f': .*No module"),
        ({"harness": {"kind": "python", "function": "sample_agents:f"}}, "sample_agents has no function f"),
        ({"evaluator": {"function": "sample_agents:f"}}, "evaluator.function .* sample_agents has no function f"),
        ({"evaluator": {"function": "sample_agents.x:f"}}, "evaluator.function .*not a package"),
        ({"harness": {"kind": "command", "command": ["no-such-program"]}}, "harness.command: .*'no-such-program'"),
        ({"harness": {"kind": "command", "command": []}}, "harness.command: "),
        ({"evaluator": {"command": ["no-such-program"]}}, "evaluator.command: .*'no-such-program'"),
        ({"harness": {"kind": "mini-swe-agent", "config": "/no/such.yaml"}}, "cannot read /no/such.yaml: No such file"),
        ({"harness": {"kind": "mini-swe-agent", "config": "/etc/passwd"}}, "harness.config: /etc/passwd"),
    ],
)
def test_what_cannot_work_is_one_line(sections, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(make_config(**sections))
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install mini-swe-agent"):
        check(make_config(harness={"kind": "mini-swe-agent", "config": "mini.yaml"}))


def test_a_demanded_bubblewrap_that_does_not_work(monkeypatch) -> None:
    monkeypatch.setattr(fence, "_candidates", lambda: ["/usr/bin/false"])
    with pytest.raises(ConfigError, match=r"harness\.shell is bubblewrap, which does not work here: .*status 1"):
        fence.find("bubblewrap", 1 << 20)
