"""`lockstep doctor`: checks of machines and their network before training.

A check is a function in the file of its group, with what each node looks at. `child.py` runs what may hang
or crash in a process that is given up on; `node_rendezvous.py` joins the nodes, as launches do;
`examine.py` runs all checks in their order, and makes the report.
"""
