"""The preset for OpenCode (npm: opencode-ai), which speaks Chat Completions and streams."""

import json

from harnessed.controller.harnesses.preset import Endpoint, Start

PROGRAM = "opencode"


def start(endpoint: Endpoint, prompt: str) -> Start:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key, "timeout": False},
        "models": {"policy": {"limit": {"context": endpoint.context, "output": endpoint.answer}}},
    }
    settings = {
        "model": "harnessed/policy",
        "provider": {"harnessed": provider},
        "agent": {"title": {"disable": True}},
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    return Start(
        arguments=["run", "--", prompt],
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={".config/opencode/opencode.json": json.dumps(settings)},
    )
