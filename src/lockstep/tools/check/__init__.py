"""`lockstep check`: find code that breaks, hangs or slows a distributed script, without running the script.

`source.py` parses a file or a notebook and indexes its names and calls. `project.py` follows values and
calls through the project's own modules. `script.py` has the queries of rules, such as which loop trains and
which branch depends on the rank; `order.py` has the order of calls. A rule is one function in a file of
`rules/`, with its text. `engine.py` runs the rules over files, `fix.py` defines edits, `editor.py` makes
them with LibCST, `output.py` writes findings. Does not import torch.
"""
