"""The preset for the OpenHands CLI (PyPI: openhands), which speaks Chat Completions and does not stream.

It runs commands in tmux where there is one, and all runs that see the same /tmp share one tmux server, which belongs to
the attempt that came first: without a fence around attempts, leave tmux off the PATH. At every start it looks for a
newer version and for the skills that its makers publish, which become part of the prompt; it has no switch for either,
and goes on without them where the network ends. Its exit status is 0 even when the model could not be reached.
"""

import json
from typing import Any

from harnessed.controller.harnesses.preset import PATIENCE_S, Endpoint, Start

PROGRAM = "openhands"


def start(endpoint: Endpoint, prompt: str) -> Start:
    settings = {
        "kind": "Agent",
        "llm": _llm(endpoint, "agent"),
        "condenser": {"kind": "LLMSummarizingCondenser", "llm": _llm(endpoint, "condenser")},
        "system_prompt_kwargs": {"cli_mode": True},
    }
    return Start(
        arguments=["--headless", f"--task={prompt}"],  # headless approves of every action
        environment={
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",  # below 16,384 tokens
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from the network
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
        files={".openhands/agent_settings.json": json.dumps(settings)},
    )


def _llm(endpoint: Endpoint, usage: str) -> dict[str, Any]:
    return {
        "usage_id": usage,
        "model": "openai/policy",  # litellm's way to say: Chat Completions
        "base_url": f"{endpoint.url}/v1",
        "api_key": endpoint.key,
        "max_input_tokens": endpoint.context,
        "max_output_tokens": endpoint.answer,
        "timeout": PATIENCE_S,  # else 5 minutes, too few while the policy is being updated
    }
