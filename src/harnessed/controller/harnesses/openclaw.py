"""The preset for OpenClaw (npm: openclaw), which speaks Chat Completions and streams.

Its `agent exec` needs neither its daemon nor the set-up that it calls onboarding, and keeps its state in a folder that
it removes at the end. It ends every request with a message on what runs in the background, which is gone from the next
one: where the model may start sub-agents or processes there, a conversation is as many rows as it has calls.
"""

import json

from harnessed.controller.harnesses.preset import Endpoint, Start

PROGRAM = "openclaw"


def start(endpoint: Endpoint, prompt: str) -> Start:
    model = {
        "id": "policy",
        "name": "policy",
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.answer,
    }
    provider = {
        "baseUrl": f"{endpoint.url}/v1",
        "apiKey": endpoint.key,
        "api": "openai-completions",
        "models": [model],
    }
    settings = {
        "agents": {"defaults": {"model": {"primary": "harnessed/policy"}}},
        "models": {"providers": {"harnessed": provider}},
        "tools": {"profile": "coding", "fs": {"workspaceOnly": False}},
        "update": {"checkOnStart": False},
        "telemetry": {"enabled": False},
    }
    return Start(
        arguments=["agent", "exec", "--timeout", "0", "--", prompt],
        environment={
            "OPENCLAW_NO_AUTO_UPDATE": "1",
            "OPENCLAW_OFFLINE": "1",  # fetches no helper programs
        },
        files={".openclaw/openclaw.json": json.dumps(settings)},
    )
