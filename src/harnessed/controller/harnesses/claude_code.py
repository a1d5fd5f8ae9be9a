"""The preset for Claude Code (npm: @anthropic-ai/claude-code), which speaks Anthropic's Messages and streams.

Its endpoint comes from the variables that every attempt has. It knows nothing of the policy's context: where a
conversation outgrows it, the gateway's refusal says so.
"""

from harnessed.controller.harnesses.preset import PATIENCE_S, Endpoint, Start

PROGRAM = "claude"


def start(endpoint: Endpoint, prompt: str) -> Start:
    return Start(
        arguments=["--dangerously-skip-permissions", "-p", "--", prompt],
        environment={
            "ANTHROPIC_MODEL": "policy",
            "ANTHROPIC_SMALL_FAST_MODEL": "policy",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Else 10 and 5 minutes, too few while the policy is being updated; pings do not count there.
            "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_S * 1000),
            "IS_SANDBOX": "1",  # else it does not run as root without asking for leave
        },
    )
