"""Harnesses and evaluators that behave in every bad way, by name: a task says which."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def act(task):
    """The harness: `task["do"]` names what it does."""
    return globals()[task["do"]](task)


def judge(task, folder):
    """The evaluator: `task["judge"]` names what it does."""
    return globals()[task.get("judge", "judge_result")](task, folder)


def answer(task):
    Path("left.txt").write_text("left")
    return {"answer": task.get("prompt")}


def show(task):
    """What it can see."""
    return {
        "environment": dict(os.environ),
        "task": task,
        "cwd": os.getcwd(),
        "files": sorted(str(p) for p in Path().rglob("*") if p.is_file()),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]),
        "stdin": sys.stdin.read(),
        "random": __import__("random").random(),
    }


def fail(task):
    print("about to fail")
    raise RuntimeError(f"it broke, and the key is {os.environ['OPENAI_API_KEY']}")


def leave(task):
    sys.exit(7)


def garbage(task):
    sys.stdout.flush()
    os.write(1, bytes(range(256)) * 100)
    os.kill(os.getpid(), signal.SIGSEGV)


def odd_signal(task):
    signal.signal(40, signal.SIG_DFL)
    os.kill(os.getpid(), 40)


def unserialisable(task):
    return object()


def hang(task):
    print("hanging", flush=True)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)


def daemons(task):
    """Processes that try to outlive it: setsid, a double fork, nohup."""
    mark = task["mark"]
    subprocess.Popen(["setsid", "sleep", mark])
    subprocess.Popen(f"nohup sleep {mark} >/dev/null 2>&1 &", shell=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", mark])
        os._exit(0)
    time.sleep(task.get("then", 0.1))


def bomb(task):
    """Generations of processes, each of which starts the next one and ends."""
    code = (
        "import os,time\nend=time.monotonic()+60\n"
        "while time.monotonic()<end:\n"
        " if os.fork(): os._exit(0)\n"
        " os.setsid()\n if os.fork()==0: time.sleep(1000)\n"
        f" '{task['mark']}'\n time.sleep(0.01)\n"
    )
    for _ in range(4):
        subprocess.Popen([sys.executable, "-S", "-c", code])
    time.sleep(0.4)


def fill_log(task):
    while True:
        sys.stdout.write("x" * 100_000)


def link_out(task):
    Path("passwd").symlink_to("/etc/passwd")
    Path("up").symlink_to("../../..")
    Path("inside.txt").write_text("inside")
    Path("inside").symlink_to("inside.txt")
    Path("deep/er").mkdir(parents=True)
    Path("deep/er/top").symlink_to("../..")
    Path("sly").symlink_to("deep/er/top/../../../../../../../etc/passwd")
    os.mkfifo("fifo")
    Path("closed").mkdir()
    Path("closed").chmod(0)
    os.symlink("/dev/zero", "../log.txt.new")
    here = os.open(".", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        here = os.open("d", os.O_RDONLY, dir_fd=here)
    os.close(here)


def call_model(task):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def judge_result(task, folder):
    return 1.0 if (folder / "result.json").exists() else 0.0


def judge_parts(task, folder):
    return {"reward": 0.5, "format": 1, "length": 2.5, "call_rewards": [0.25, 0]}


def judge_hidden(task, folder):
    return float(json.loads((folder / "result.json").read_text())["answer"] == task["secret"])


def judge_error(task, folder):
    raise KeyError("the evaluator is broken")


def judge_text(task, folder):
    return "good"


def judge_nan(task, folder):
    return float("nan")


def judge_hang(task, folder):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)


def judge_exit(task, folder):
    os._exit(3)


def judge_second_time(task, folder):
    """Breaks once, and spoils the copy that it was given."""
    mark = Path(task["mark"])
    if not mark.exists():
        mark.write_text("tried")
        (folder / "workspace" / "left.txt").unlink()
        raise RuntimeError("once")
    return 1.0 if (folder / "workspace" / "left.txt").read_text() == "left" else 0.0


def judge_links(task, folder):
    """1 only if the copy holds what it should and nothing leads out of it."""
    work = folder / "workspace"
    top = os.path.realpath(folder)
    seen = {p.name for p in work.iterdir()}
    inside = all(os.path.realpath(p).startswith(top) for p in folder.rglob("*"))
    right = {"inside", "inside.txt", "deep", "closed"} <= seen and not {"passwd", "up", "sly", "fifo"} & seen
    return float(inside and right and (work / "inside").read_text() == "inside")


def judge_late(task, folder):
    """1 only if no process of the agent lives."""
    mark = task["mark"].encode()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in process.read_bytes() and b"sleep" in process.read_bytes():
                return 0.0
        except OSError:
            pass
    return 1.0
