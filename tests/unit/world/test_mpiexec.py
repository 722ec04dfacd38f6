"""From the variables that Open MPI, MPICH and Intel MPI set to worlds."""

from __future__ import annotations

import pytest

from lockstep.errors import WorldError
from lockstep.world import World, detect
from lockstep.world.environments.mpiexec import detect_mpich

#: As seen from Open MPI 5.0.11, on a host of two ranks.
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-3614@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "prterun-vm-3614@0.0;tcp4://127.0.0.1:38803",
}
#: The names that Open MPI 4 has for a job.
OPENMPI_4 = {
    **{name: value for name, value in OPENMPI.items() if not name.startswith("PMIX_")},
    "OMPI_MCA_ess_base_jobid": "3262906369",
    "OMPI_MCA_orte_local_daemon_uri": "3262906368.0;tcp://10.0.0.1:38803",
}
#: As seen from MPICH 5.0.2.
MPICH = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
#: As Intel MPI documents them: MPICH's, and names of its own.
INTEL = {
    **MPICH,
    "I_MPI_HYDRA_TOPOLIB": "hwloc",
    "I_MPI_MPIRUN": "mpirun",
    "MPI_LOCALNRANKS": "4",
    "MPI_LOCALRANKID": "3",
    "PMI_RANK": "7",
    "PMI_SIZE": "8",
}
#: What Slurm sets where it is the process manager of an MPI program: srun --mpi=pmi2.
SRUN = {
    "PMI_FD": "9",
    "PMI_JOBID": "17.0",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
}
PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
KEY = "openmpi-prterun-vm-3614@1-prterun-vm-3614@0.0;tcp4://127.0.0.1:38803"


def test_open_mpi() -> None:
    assert detect(OPENMPI) == World(
        rank=1,
        size=2,
        local_rank=1,
        local_size=2,
        address="127.0.0.1",
        key=KEY,
        environment="openmpi",
        reason="OMPI_COMM_WORLD_RANK is set",
    )


def test_open_mpi_4_names_its_jobs_otherwise() -> None:
    assert detect(OPENMPI_4).key == "openmpi-3262906369-3262906368.0;tcp://10.0.0.1:38803"


def test_open_mpi_on_several_nodes() -> None:
    world = detect({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "5"})
    assert (world.rank, world.local_rank, world.local_size) == (5, 1, 2)
    assert (world.placed, world.by_mpi, world.address) == (False, True, None)


def test_open_mpi_on_several_nodes_with_an_address() -> None:
    world = detect({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "6", "MASTER_ADDR": "node0"})
    assert (world.address, world.port, world.by_mpi) == ("node0", None, False)
    # Servers differ from node to node; the job's name does not.
    assert world.key == "openmpi-prterun-vm-3614@1"


def test_the_number_of_a_process_among_all_jobs_is_not_that_of_a_node() -> None:
    assert detect({**OPENMPI, "OMPI_COMM_WORLD_NODE_RANK": "3"}).node_rank == 0


@pytest.mark.parametrize(("variables", "rank"), [(MPICH, 1), (INTEL, 7)])
def test_hydra(variables: dict[str, str], rank: int) -> None:
    world = detect({**variables, **PLACE})
    assert (world.environment, world.rank, world.size) == (
        "mpich",
        rank,
        int(variables["PMI_SIZE"]),
    )
    assert (world.local_rank, world.local_size) == (rank % 4, int(variables["MPI_LOCALNRANKS"]))
    assert (world.address, world.port, world.key, world.by_mpi) == ("10.0.0.1", 29500, None, False)


def test_hydra_on_several_nodes() -> None:
    world = detect(INTEL)
    assert (world.placed, world.by_mpi, world.address, world.key) == (False, True, None, None)


def test_an_address_alone_does_not_name_a_job() -> None:
    world = detect({**INTEL, "MASTER_ADDR": "node0"})
    assert (world.address, world.port, world.by_mpi) == ("node0", None, True)


def test_a_port_alone_will_do_on_one_node() -> None:
    world = detect({**OPENMPI, "MASTER_PORT": "29500"})
    assert (world.address, world.port, world.key) == ("127.0.0.1", 29500, None)


def test_a_file_to_meet_in() -> None:
    world = detect({**INTEL, "LOCKSTEP_INIT_METHOD": "file:///shared/rendezvous"})
    assert (world.file, world.environment, world.rank) == ("/shared/rendezvous", "mpich", 7)


def test_no_process_of_hydra_in_sight_leaves_it_to_mpi() -> None:
    world = detect(MPICH)
    assert (world.by_mpi, world.key, world.address) == (True, None, "127.0.0.1")


def test_a_single_rank_needs_no_place_to_meet() -> None:
    one = {
        **MPICH,
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "1",
    }
    world = detect(one)
    assert (world.size, world.key, world.by_mpi, world.environment) == (1, None, False, "mpich")


def test_hydra_that_says_nothing_of_nodes() -> None:
    world = detect({"PMI_RANK": "1", "PMI_SIZE": "2", **PLACE})
    assert (world.placed, world.local_rank, world.local_size) == (False, 1, 2)


def test_srun_as_a_process_manager_is_slurm() -> None:
    assert detect_mpich(SRUN) is None
    assert detect_mpich({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **PLACE}) is not None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_LOCAL_RANK is not set",
        ),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}, "rank is 2 with size 2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local_rank is 2 with local_size 2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "4 local processes in a world of 2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "two"}, "expected an integer"),
        ({**OPENMPI, "MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is not set"),
        ({**MPICH, "PMI_RANK": "-1"}, "rank is -1 with size 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, "MPI_LOCALNRANKS is not set"),
        ({"PMI_PORT": "vm:44741", "PMI_ID": "0"}, "PMI_PORT and PMI_ID are set"),
    ],
)
def test_contradictions_are_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(WorldError) as caught:
        detect(variables)
    assert said in str(caught.value)
