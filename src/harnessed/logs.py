"""How the processes of Harnessed log: lines for people, or one JSON object a line. No key ever gets into them.

The command line calls `configure` for gateway, controller and engine. A line about a call says which one: its record
has `run`, `rollout`, `attempt` and `call`, given by `extra=`.
"""

import json
import logging
import re
import sys
import time
from typing import Literal

Form = Literal["text", "json"]
FIELDS = ("run", "rollout", "attempt", "call")
_KEYS = re.compile(
    r"(?P<before>/a/|[?&]key=|\bBearer\s+|\b(?:x-api-key|x-goog-api-key|authorization)['\"]?\s*[:=,]\s*b?['\"]?)"
    r"(?P<word>Bearer\s+)?[^\s/?&'\",)]+"
    r"|\bsk-[\w.-]{3,}",
    re.IGNORECASE,
)


def configure(form: Form) -> None:
    """Log to stderr from now on: the project from INFO on, others from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("harnessed").setLevel(logging.INFO)


def say(text: str) -> None:
    """One line for whoever started the process, in the form that was configured."""
    if any(isinstance(handler.formatter, Json) for handler in logging.getLogger().handlers):
        logging.getLogger("harnessed").info(text)
    else:
        print(f"harnessed: {text}", file=sys.stderr, flush=True)


def entry(form: Form, text: str) -> str:
    """A line that another process writes into the log of one that logs in this form."""
    if form == "text":
        return f"harnessed: {text}"
    return Json().format(logging.makeLogRecord({"name": "harnessed", "levelname": "WARNING", "msg": text}))


def redact(text: str) -> str:
    """Without anything that may be a key: ours, somebody else's, or what stands where one belongs."""
    return _KEYS.sub(lambda found: f"{found['before'] or ''}***", text)


def visible(text: str, kept: str = "") -> str:
    """With control characters as they are written in code: what others wrote begins no line and commands no terminal.
    `kept` stay."""
    return "".join(each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text)


class Text(logging.Formatter):
    """Time, level, logger, message; of a call, its FIELDS behind it: `[run=demo rollout=g.0 attempt=1 call=2f6d]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = visible(record.message)
        said = super().formatMessage(record)
        about = {name: value for name in FIELDS if (value := getattr(record, name, None))}
        return f"{said} [{' '.join(f'{name}={value}' for name, value in about.items())}]" if about else said

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class Json(logging.Formatter):
    """`time` (RFC 3339, UTC), `level`, `logger`, `message`; of a call its FIELDS; `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)
