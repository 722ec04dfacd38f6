"""Proof of the promise on a user's own script: run it on several layouts, compare every step."""
