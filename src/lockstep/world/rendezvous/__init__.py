"""Rendezvous of ranks and launchers: port discovery, store, membership and connectivity checks."""
