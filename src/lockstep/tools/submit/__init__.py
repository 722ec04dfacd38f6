"""Slurm jobs: request, job script, submission, following."""
