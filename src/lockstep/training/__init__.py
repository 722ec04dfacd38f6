"""The run: the one object that a training script talks to."""
