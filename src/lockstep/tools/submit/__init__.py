"""`lockstep submit`: write a job script for a cluster, submit it, and follow the job's output."""
