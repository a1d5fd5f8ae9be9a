"""The preset for OpenAI's Codex CLI (npm: @openai/codex). It speaks Responses, to an endpoint that a file names."""

import json

from harnessed.controller.harnesses.preset import PATIENCE_S, Endpoint, Start

PROGRAM = "codex"


def start(endpoint: Endpoint, prompt: str) -> Start:
    settings = {
        "model": "policy",
        "model_provider": "harnessed",
        "model_context_window": endpoint.context,
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "model_providers.harnessed.name": "harnessed",
        "model_providers.harnessed.base_url": f"{endpoint.url}/v1",
        "model_providers.harnessed.env_key": "OPENAI_API_KEY",
        "model_providers.harnessed.wire_api": "responses",
        "model_providers.harnessed.stream_idle_timeout_ms": PATIENCE_S * 1000,  # else 5 minutes
    }
    return Start(
        # The fence around the attempt is Harnessed's, so that Codex asks nobody for leave and builds no second one.
        arguments=["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt],
        files={".codex/config.toml": "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())},
    )
