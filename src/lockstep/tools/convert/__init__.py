"""`lockstep convert`: turns a single-device or a plain DDP script into a Lockstep script.

Facts come from `lockstep.tools.check`: names, values, calls and loops of the file. `models.py`, `data.py`,
`loops.py`, `losses.py`, `passes.py`, `carried.py`, `decisions.py`, `processes.py`, `ranks.py`,
`precision.py` and `saving.py` each turn one kind of fact into edits and questions of a `Draft`;
`run_scope.py` finds where the `Run` is made and passes it to functions and classes, `unused.py` removes
what has no use any more; `script.py` puts all together. What cannot be decided is a question
(`questions.py`): a comment in the script. Does not import torch, does not run a script.
"""
