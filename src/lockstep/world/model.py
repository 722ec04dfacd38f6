"""`World`: rank, local rank, node rank, their counts, and the rendezvous of a process."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import WorldError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Rank and rendezvous of a process, read from its environment.

    Attributes:
        rank: rank of this process, `0 <= rank < size`.
        size: number of processes.
        local_rank: rank of this process on its node.
        local_size: number of processes on this node.
        node_rank: rank of this node.
        node_count: number of nodes.
        placed: whether local and node ranks are known; otherwise the rendezvous sets both.
        address: host of the rendezvous store: the host of rank 0, or of the launcher.
        port: port of that store; `None` if the ranks find it by port discovery under `key`.
        key: name of the job, unique among the jobs on its nodes.
        file: path of a `FileStore` for the rendezvous, in a directory that all nodes share.
        launch_file: path of the launcher's `FileStore` for the rendezvous.
        by_mpi: whether the ranks exchange the rendezvous address over MPI.
        generation: number of restarts of the ranks before this process started.
        agent_store: whether the launcher hosts the store, so that all ranks are clients.
        environment: name of the detected launcher environment, such as `torchrun` or `slurm`.
        reason: reason for the choice of `environment`.

    Raises:
        WorldError: if the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    node_count: int = 1
    placed: bool = True
    address: str | None = None
    port: int | None = None
    key: str | None = None
    file: str | None = None
    launch_file: str | None = None
    by_mpi: bool = False
    generation: int = 0
    agent_store: bool = False
    environment: str = "single"
    reason: str = ""

    def __post_init__(self) -> None:
        for index_name, count_name in (
            ("rank", "size"),
            ("local_rank", "local_size"),
            ("node_rank", "node_count"),
        ):
            index, count = getattr(self, index_name), getattr(self, count_name)
            if not 0 <= index < count:
                raise WorldError(
                    f"{self.environment}: {index_name} is {index} with {count_name} {count}; "
                    f"expected 0 <= {index_name} < {count_name}",
                    hint="two launchers may have set variables of one process; start from a clean shell",
                )
        if self.local_size > self.size:
            raise WorldError(
                f"{self.environment}: {self.local_size} local processes in a world of {self.size}; "
                "expected at most the size of the world",
                hint="check LOCAL_WORLD_SIZE and WORLD_SIZE",
            )
        by_address = self.address is not None and (self.port is not None or self.key is not None)
        if self.size > 1 and not (by_address or self.file or self.launch_file or self.by_mpi):
            raise WorldError(
                f"{self.environment}: {self.size} processes but no rendezvous address",
                hint="set MASTER_ADDR and MASTER_PORT, or start with `lockstep run`",
            )

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which prints messages and writes files."""
        return self.rank == 0
