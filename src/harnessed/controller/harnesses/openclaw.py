"""The preset for OpenClaw (npm: openclaw), which speaks Chat Completions and streams.

Its `agent exec` needs neither its daemon nor the set-up that it calls onboarding, and keeps its state in a folder that
it removes at the end.
"""

import json

from harnessed.controller.harnesses.preset import Endpoint, Start

PROGRAM = "openclaw"

_STATUS_TOOLS = ["process", "sessions_spawn", "subagents", "image_generate", "video_generate", "music_generate"]
"""For these OpenClaw ends every request with a message on what runs in the background, and takes it out of the next.
With them a conversation would be as many rows as it has calls. Without `process`, commands run in the foreground."""


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
        "tools": {"profile": "coding", "fs": {"workspaceOnly": False}, "deny": _STATUS_TOOLS},
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
