"""A component of torchx, which runs a script by `lockstep run` on several nodes.

`torchx run -s SCHEDULER examples/clusters/torchx_lockstep.py:train --nodes 2 --script train.py`
"""

from torchx import specs


def train(
    script: str,
    *args: str,
    image: str = "",
    nodes: int = 1,
    ranks: int = 1,
    run_dir: str = "runs/torchx",
    max_retries: int = 3,
) -> specs.AppDef:
    """Run a script by `lockstep run` on each of several nodes.

    Args:
        script: the script, in the image or in the working directory.
        args: its arguments.
        image: image of the containers, or a directory for local schedulers.
        nodes: number of nodes.
        ranks: ranks on each node.
        run_dir: directory of the run, which all nodes share.
        max_retries: number of times that the scheduler starts the job again, which then continues.
    """
    # torchx puts in the number of the node, and the name of the variable with the host of node 0.
    number, first = specs.macros.replica_id, f"$${{{specs.macros.rank0_env}:=localhost}}"
    nodes_flags = f'--nnodes {nodes} --node-rank {number} --master-addr "{first}"'
    launch = f"exec lockstep run {nodes_flags} -n {ranks} --run-dir {run_dir}"
    role = specs.Role(
        name="train",
        image=image,
        entrypoint="bash",
        args=["-c", f'{launch} "$@"', "bash", script, *args],
        num_replicas=nodes,
        max_retries=max_retries,
    )
    return specs.AppDef(name="lockstep", roles=[role])
