"""The preset for Qwen Code (npm: @qwen-code/qwen-code), which speaks Chat Completions and streams."""

import json

from harnessed.controller.harnesses.preset import Endpoint, Start

PROGRAM = "qwen"


def start(endpoint: Endpoint, prompt: str) -> Start:
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        # Calls in the background that go over the conversation once more.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
        "model": {
            "generationConfig": {
                "contextWindowSize": endpoint.context,
                "samplingParams": {"max_tokens": endpoint.answer},
                "timeout": 0,  # else 2 minutes, too few while the policy is being updated
                "streamIdleTimeoutMs": 0,
            }
        },
    }
    return Start(
        arguments=["--auth-type", "openai", "--model", "policy", "--yolo", f"--prompt={prompt}"],
        files={".qwen/settings.json": json.dumps(settings)},
    )
