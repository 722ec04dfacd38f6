"""`lockstep doctor`: check machines and their network before training.

Each check has a function that gathers facts on each node, and a function that judges the facts; both are in
the file of its group. Gathering may hang or crash, so it runs in child processes with a timeout.
`node_rendezvous.py` joins the nodes, as launches do; `examine.py` runs all checks in order, and makes the
report.
"""
