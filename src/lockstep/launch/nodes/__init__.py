"""Launches over several nodes: rendezvous of launchers, membership, and decisions for all."""
