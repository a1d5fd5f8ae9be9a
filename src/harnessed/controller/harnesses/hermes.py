"""The preset for Nous Research's Hermes Agent (PyPI: hermes-agent), which speaks Chat Completions and streams."""

import json

from harnessed.controller.harnesses.preset import Endpoint, Start

PROGRAM = "hermes"

_LEAST_CONTEXT = 64_000
"""With less it refuses to start. When there is less, the endpoint's error tells it that a conversation is too long."""


def start(endpoint: Endpoint, prompt: str) -> Start:
    settings = {
        "model": {
            "default": "policy",
            "provider": "custom",
            "base_url": f"{endpoint.url}/v1",
            "api_key": endpoint.key,
            "context_length": max(endpoint.context, _LEAST_CONTEXT),
            "max_tokens": endpoint.answer,
        },
        # Calls beside the conversation: its title, and after some turns what could be learnt from it.
        "auxiliary": {"title_generation": {"enabled": False}},
        "memory": {"memory_enabled": False, "user_profile_enabled": False},
        "skills": {"creation_nudge_interval": 0},
        "curator": {"enabled": False},
        # What it would fetch from elsewhere. (For its look at the package index for a newer version it has no switch.)
        "model_catalog": {"enabled": False},
        "security": {"tirith_enabled": False, "allow_lazy_installs": False},
        "terminal": {"home_mode": "real"},  # commands keep HOME, in a container too
    }
    return Start(
        arguments=["chat", "--yolo", "--quiet", f"--query={prompt}"],
        files={".hermes/config.yaml": json.dumps(settings)},
    )
