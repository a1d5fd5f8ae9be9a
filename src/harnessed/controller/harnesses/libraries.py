"""Variables for agents that are written with a library: its endpoint is OpenAI's or Anthropic's SDK's, which every
attempt has, and what it tells its makers is switched off. Called by launch.py."""

ENVIRONMENTS = {
    "openai-agents": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    "langchain": {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"},
    "python": {},
}
"""The harness's kind -> its variables."""
