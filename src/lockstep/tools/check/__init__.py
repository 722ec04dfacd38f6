"""`lockstep check`: finds what breaks, hangs or slows a distributed script, by reading it.

`source.py` parses a file or a notebook, `project.py` follows names and calls through the file and the
project's own modules, `script.py` answers what rules ask: which loop trains, which branch depends on the
rank. `order.py` answers which call comes first. A rule is one function in `rules/`, with its text.
`engine.py` runs the rules over paths, `fix.py` edits the concrete syntax, `output.py` writes findings.
Imports nothing of torch, runs nothing of a script.
"""
