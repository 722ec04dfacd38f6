"""Variables that Slurm 22.05 sets in processes of several kinds, as recorded: those that Lockstep reads.

More kinds are tried under a real Slurm, in tests/slurm. `EIGHT_RANK_5` and `SIXTEEN_RANK_11` are not
recorded: they follow the manual of srun, for nodes with more cores than there were.
"""

from __future__ import annotations


def _step(base: dict[str, str] | None = None, /, **changes: str) -> dict[str, str]:
    """Return the variables of a step that differ from those of another, named without `SLURM_`."""
    return {**(base or {}), **{f"SLURM_{name}": value for name, value in changes.items()}}


#: srun -N2 -n4: task 2 of 4, three on the first node.
STEP_RANK_2 = _step(
    CLUSTER_NAME="lockstep",
    JOBID="1",
    JOB_ID="1",
    LOCALID="2",
    NODEID="0",
    NTASKS="4",
    PROCID="2",
    STEP_ID="0",
    STEP_NODELIST="n[1-2]",
    STEP_NUM_NODES="2",
    STEP_NUM_TASKS="4",
    STEP_TASKS_PER_NODE="3,1",
)
#: the script of `sbatch -N2 -n4`.
BATCH_SCRIPT = _step(
    CLUSTER_NAME="lockstep", JOBID="2", JOB_ID="2", LOCALID="0", NODEID="0", NTASKS="4", PROCID="0"
)
#: the command of `salloc -N2 -n3 COMMAND`, which runs where salloc does.
SALLOC_SHELL = _step(CLUSTER_NAME="lockstep", JOBID="3", JOB_ID="3", NTASKS="3")
_ONE_TASK = _step(
    STEP_RANK_2,
    PROCID="0",
    LOCALID="0",
    STEP_NODELIST="n1",
    STEP_NUM_NODES="1",
    STEP_NUM_TASKS="1",
    STEP_TASKS_PER_NODE="1",
)
#: the shell of `srun -n1 --pty bash`.
PTY_SHELL = _step(_ONE_TASK, NTASKS="1", PTY_PORT="42757")
#: the shell of `salloc -N2 -n3` with LaunchParameters=use_interactive_step.
INTERACTIVE_STEP = _step(_ONE_TASK, NTASKS="3", STEP_ID="4294967290", PTY_PORT="37015")
_THREE = _step(STEP_RANK_2, NTASKS="3", STEP_NUM_TASKS="3", LOCALID="0")
#: srun in that shell: task 0; the terminal's port is inherited.
STEP_OF_INTERACTIVE = _step(_THREE, PROCID="0", STEP_TASKS_PER_NODE="2,1", PTY_PORT="37015")
#: srun -N2 -n3 -m arbitrary, first host n2: task 0.
ARBITRARY_RANK_0 = _step(
    _THREE, PROCID="0", NODEID="1", STEP_TASKS_PER_NODE="1,2", DISTRIBUTION="arbitrary"
)
#: srun -N1 -n1 … : -N1 -n2 …: task 1.
HET_RANK_1 = _step(_THREE, PROCID="1", NODEID="1", STEP_TASKS_PER_NODE="1,2")
#: srun -N2 -n4 --ntasks-per-node=2 -m cyclic: task 1, the first on the second node.
CYCLIC_RANK_1 = _step(STEP_RANK_2, PROCID="1", NODEID="1", LOCALID="0", STEP_TASKS_PER_NODE="2(x2)")
#: srun -N1 --ntasks-per-node=8: task 5 of 8, all on one node.
EIGHT_RANK_5 = _step(
    STEP_RANK_2,
    NTASKS="8",
    PROCID="5",
    LOCALID="5",
    STEP_NODELIST="SH-IDC1-10-5-36-65",
    STEP_NUM_NODES="1",
    STEP_NUM_TASKS="8",
    STEP_TASKS_PER_NODE="8",
)
#: srun -N2 --ntasks-per-node=8: task 11 of 16, the fourth on the second node.
SIXTEEN_RANK_11 = _step(
    STEP_RANK_2,
    NTASKS="16",
    NODEID="1",
    PROCID="11",
    LOCALID="3",
    STEP_NODELIST="SH-IDC1-10-5-36-[65-66]",
    STEP_NUM_TASKS="16",
    STEP_TASKS_PER_NODE="8(x2)",
)
