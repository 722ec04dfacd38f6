"""How gradients meet: every exchange turns the nodes of all ranks into their sum."""
