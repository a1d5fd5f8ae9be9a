"""The rollout controller: claims rollouts from the gateway, runs the harness on each, judges what it left, reports.

    reconciler.py   observe, compare, act: the loop, for every kind of runner; `run_controller` is the way in
    runner.py       what the loop asks of a runner
    check.py        what can be known to be wrong before anything starts
    local.py        the runner of this machine: one folder and one fenced tree of processes per attempt
    folders.py      an attempt's folder: made, copied, removed
    evaluation.py   the evaluator, on a copy of the folder; verdict.py reads what it says
    spawner.py      the controller's end of a warm template, which is warm.py (the loop that forks and buries),
                    child.py (from the fork to the end of an attempt), processes.py (Linux) and orders.py (messages)
    fence.py        what the model's shell runs in
    harnesses/      how each known harness is told its endpoint, model and limits

The template's side (warm, child, processes, orders, verdict, harnesses/mini_swe_agent) imports only the standard
library and the harness: whatever it imported would be copied by every fork.
"""
