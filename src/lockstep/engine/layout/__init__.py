"""Integers of a layout: replicas, samples, random keys, reduction tree. No torch."""
