"""A small gateway over real HTTP: the control routes that a controller calls, and a model that follows a script."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str, dict[str, Any]], str]
"""(API key, request) -> the assistant's text."""

FINISH = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo {}\n```"


class ScriptedGateway:
    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or (lambda key, request: FINISH.format("done"))
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Model calls: (key, request)."""
        self.queue: list[dict[str, Any]] = []
        self.leased: set[str] = set()
        self.ends: dict[str, dict[str, Any]] = {}
        self.end_times: dict[str, float] = {}
        self.refused_ends: list[str] = []
        self.claims: list[dict[str, Any]] = []
        self.presences: list[dict[str, Any] | None] = []
        """What controllers said of themselves, in the order of their renewals."""
        self.claiming = 0
        """Claims that wait for something to do, also those of controllers that died."""
        self.answered: dict[str, float] = {}
        """When the claim that holds this attempt was answered."""
        self.lose_claims = 0
        """So many claims are granted, and their answer is lost."""
        self.down = False
        self.turned_away: list[str] = []
        """Paths that were asked for while it was down."""
        self.changed = threading.Condition()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"null")
                key = self.headers.get("authorization", "").removeprefix("Bearer ")
                answer = gateway.turn_away(self.path) if gateway.down else gateway.answer(self.path, key, body)
                if answer is None:
                    self.close_connection = True
                    return
                status, value = answer
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.02], daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, rollout: str, task: dict[str, Any], attempt: int = 1) -> str:
        """Queue an attempt."""
        with self.changed:
            self.queue.append(assignment(rollout, task, attempt))
            self.changed.notify_all()
        return f"{rollout}/{attempt}"

    def wait(self, condition: Callable[[], Any], limit_s: float = 20) -> Any:
        with self.changed:
            assert self.changed.wait_for(condition, limit_s), f"waited {limit_s} s in vain; ends: {self.ends}"
            return condition()

    def end(self, name: str, limit_s: float = 20) -> dict[str, Any]:
        return self.wait(lambda: self.ends.get(name), limit_s)

    def answer(self, path: str, key: str, body: Any) -> tuple[int, Any] | None:
        if path == "/v1/chat/completions":
            return self.complete(key, body)
        assert key == "admin"
        if path == "/api/attempts/claim":
            return self.claim(body)
        if path == "/api/attempts/renew":
            return self.renew(body)
        if path.endswith("/end"):
            _, _, _, rollout, _, attempt, _ = path.split("/")
            return self.record_end(rollout, int(attempt), body)
        return 404, {"error": {"message": path}}

    def renew(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.changed:
            self.presences.append(body["presence"])
            self.changed.notify_all()
            return 200, sorted(self.leased)

    def turn_away(self, path: str) -> tuple[int, Any]:
        with self.changed:
            self.turned_away.append(path)
            self.changed.notify_all()
        return 503, {"error": {"message": "down"}}

    def complete(self, key: str, request: dict[str, Any]) -> tuple[int, Any]:
        with self.changed:
            self.requests.append((key, request))
            self.changed.notify_all()
        message = {"role": "assistant", "content": self.script(key, request)}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": request["model"]}
        return 200, answer | {"choices": [choice], "usage": usage}

    def claim(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        with self.changed:
            self.claims.append(body)
            self.claiming += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.queue, min(body["wait_s"], 5))
            self.claiming -= 1
            self.changed.notify_all()
            taken, self.queue = self.queue[: body["most"]], self.queue[body["most"] :]
            names = [f"{a['rollout']}/{a['attempt']}" for a in taken]
            self.leased.update(names)
            self.answered |= dict.fromkeys(names, time.monotonic())
            if taken and self.lose_claims:
                self.lose_claims -= 1
                return None
            return 200, taken

    def record_end(self, rollout: str, attempt: int, body: dict[str, Any]) -> tuple[int, Any]:
        name = f"{rollout}/{attempt}"
        with self.changed:
            if name not in self.leased:
                self.refused_ends.append(name)
                self.changed.notify_all()
                return 409, {"error": {"message": f"{name} is not live"}}
            self.leased.remove(name)
            self.ends[name] = body
            self.end_times[name] = time.monotonic()
            self.changed.notify_all()
        state = {"id": rollout, "run": "r", "group": "g", "index": 0, "purpose": "train", "state": "finished"}
        return 200, state | {"attempt": attempt, "created": 0}


def assignment(rollout: str, task: dict[str, Any], attempt: int = 1) -> dict[str, Any]:
    key = f"key-{rollout}-{attempt}"
    record = {"rollout": rollout, "attempt": attempt, "run": "r", "task": task, "key": key}
    return record | {"evaluator_key": f"judge-{rollout}"}
