"""`lockstep doctor`: check machines and their network before training.

A check is a function that judges facts, in the file of its group, with the function that gathers these
facts on each node. Facts are gathered in child processes with a timeout, since that may hang or crash.
`node_rendezvous.py` joins the nodes, as launches do; `examine.py` runs all checks in order, and makes the
report.
"""
