"""`lockstep check`: finds what breaks, hangs or slows a distributed script, by reading it.

`source.py` parses a file or a notebook and has its names and calls, `project.py` follows values and calls
through the project's own modules, `script.py` has the queries of rules: which loop trains, which branch
depends on the rank; `order.py` which call comes first. A rule is one function in a file of `rules/`, with
its text. `engine.py` runs the rules over paths, `fix.py` defines edits, `editor.py` makes them with LibCST,
`output.py` writes findings. Does not import torch, does not run a script.
"""
