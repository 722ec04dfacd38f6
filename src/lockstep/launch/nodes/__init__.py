"""Launches over several nodes: rendezvous of launchers, membership, and common decisions."""
