"""The gateway between harnesses and the policy: serves model calls, records them exactly, keeps rollouts and groups.

Runs without torch and transformers. `app.py` assembles it; `exchange.py` is one call from arrival to stored record.
"""
