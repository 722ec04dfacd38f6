"""`lockstep convert`: turn a single-device script or a plain DDP script into a Lockstep script.

`lockstep.tools.check` finds names, values, calls and loops of the script. Each of `models.py`, `data.py`,
`loops.py`, `losses.py`, `passes.py`, `carried.py`, `decisions.py`, `ddp.py`, `ranks.py`,
`precision.py` and `saving.py` adds edits and questions on its subject to a `Draft`. `run_scope.py` finds
where the `Run` is made and passes it to functions and classes, `unused.py` removes code without a use,
`script.py` runs all of these. A change that cannot be decided becomes a question (`questions.py`): a
comment in the script. Does not import torch and does not run the script.
"""
