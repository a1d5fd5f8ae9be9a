"""The preset for Claude Code (npm: @anthropic-ai/claude-code), which speaks Anthropic's Messages and streams.

Its endpoint comes from the variables that every attempt has. It knows nothing of the policy's context: where a
conversation outgrows it, the gateway's refusal says so.
"""

from harnessed.controller.harnesses.preset import Endpoint, Start

PROGRAM = "claude"


def start(endpoint: Endpoint, prompt: str) -> Start:
    return Start(
        arguments=["--dangerously-skip-permissions", "-p", "--", prompt],
        environment={
            "ANTHROPIC_MODEL": "policy",
            "ANTHROPIC_SMALL_FAST_MODEL": "policy",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # else it does not run as root without asking for leave
        },
    )
