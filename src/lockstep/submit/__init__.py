"""Jobs for Slurm: from what the user asks for to a job script, a job number and the job's end."""
