"""The preset for mini-swe-agent, unmodified, by its own Python API and its own YAML.

`settings` is called in the controller; `warm_up` once in the warm template, then `run` in a process of its own for
every attempt (by child.py). litellm loads half of itself at its first call, so the template makes one, to a stub that
no attempt ever talks to, and closes every socket: children that share a connection would read each other's answers.
"""

import asyncio
import functools
import gc
import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harnessed.controller.harnesses.preset import PATIENCE_S

if TYPE_CHECKING:
    from harnessed.controller.fence import Fence
    from harnessed.controller.folders import AttemptFolder

ENVIRONMENT = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from the network
}
"""Read by the harness when it is imported."""


def settings(config: str, gateway: str, key: str, fence: "Fence | None", folder: "AttemptFolder") -> dict[str, Any]:
    """What `run` needs, as JSON."""
    shell: dict[str, Any] = {"environment_class": "local"}
    if fence:
        arguments = list(fence.for_attempt(folder.home))
        shell = {"environment_class": "bubblewrap", "executable": fence.executable, "wrapper_args": arguments}
    shell["cwd"] = str(folder.workspace)
    return {"config": config, "endpoint": {"api_base": f"{gateway}/v1", "api_key": key}, "environment": shell}


def run(prompt: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One attempt: how the agent ended and what it submitted."""
    from minisweagent.agents import get_agent
    from minisweagent.environments import get_environment

    config = _read(settings["config"])
    environment = get_environment(config.get("environment", {}) | settings["environment"])
    agent = get_agent(_model(settings), environment, config.get("agent", {}), default_type="default")
    result = agent.run(prompt)
    return {"exit_status": result.get("exit_status", ""), "submission": result.get("submission", "")}


def warm_up(config: str) -> None:
    """Import all that a rollout needs and make one complete call, and leave neither socket nor event loop behind."""
    import litellm
    from minisweagent.agents import get_agent_class
    from minisweagent.environments import get_environment_class
    from minisweagent.exceptions import FormatError

    sockets = _sockets()
    litellm.suppress_debug_info = True
    get_agent_class(_read(config).get("agent", {}).get("agent_class", "default"))
    for shell in ("bubblewrap", "local"):
        get_environment_class(shell)
    os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"
    with _stub() as url, suppress(FormatError):  # the stub's answer holds no command
        model = _model({"config": config, "endpoint": {"api_base": f"{url}/v1", "api_key": "warm-up"}})
        model.query([{"role": "user", "content": "warm up"}])
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if not asyncio.iscoroutinefunction(getattr(client, "close", asyncio.sleep)):
            client.close()
    litellm.in_memory_llm_clients_cache.flush_cache()
    # An epoll descriptor shared by children would mix up their events: close the event loop that litellm asked for.
    asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop_policy(None)
    gc.collect()
    if left := _sockets() - sockets:
        raise RuntimeError(f"the warm-up call of mini-swe-agent left {len(left)} sockets open")


@functools.cache
def _read(config: str) -> dict[str, Any]:
    from minisweagent.config import get_config_from_spec

    tree: dict[str, Any] = get_config_from_spec(config)
    return tree


def _model(settings: dict[str, Any]) -> Any:
    from minisweagent.models import get_model

    model = dict(_read(settings["config"]).get("model", {}))
    # The gateway serves its policy under any name; the prefix makes litellm speak the OpenAI protocol.
    if not model.get("model_name", "").startswith("openai/"):
        model["model_name"] = "openai/policy"
    # A call may be held while the policy is being updated, for longer than the 10 minutes that litellm waits by itself.
    model["model_kwargs"] = {"timeout": PATIENCE_S} | model.get("model_kwargs", {}) | settings["endpoint"]
    return get_model(config=model)


class _Stub(http.server.BaseHTTPRequestHandler):
    """Answers as the OpenAI API does, chat completions and responses."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"id": "warm-up", "created": 0, "created_at": 0, "model": request["model"], "status": "completed"}
        if self.path.endswith("/responses"):
            content = [{"type": "output_text", "text": "warm", "annotations": []}]
            item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
            usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
            answer |= {"object": "response", "output": [item], "usage": usage}
        else:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "warm"}}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer |= {"object": "chat.completion", "choices": [choice], "usage": usage}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _stub() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stub) as server:
        serving = threading.Thread(target=server.serve_forever, args=[0.01])
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def _sockets() -> set[str]:
    links = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            links.add(str(descriptor.readlink()))
    return {link for link in links if link.startswith("socket:")}
