"""The plan, and the keystone: every worker finds itself in the world that the plan meant."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lockstep.errors import DeviceError, UsageError
from lockstep.launch.devices.machine import Machine
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.nodes.config import Nodes
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.plan import arguments, command, count_ranks, resolve
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.imports import Sources
from lockstep.world import World, detect
from tests.unit.launch.planning import LAPTOP, membership_of, plan

SERVER = Machine(cores=64, gpus=4)


#: Ranks of each launcher, and the node that each is on.
MEMBERSHIPS = (
    ((1,), (0,)),
    ((4,), (0,)),
    ((2, 2), (0, 1)),
    ((1, 1, 1), (0, 1, 2)),
    ((2, 1, 3), (0, 0, 1)),
    ((1, 2, 3), (0, 1, 0)),
)


@pytest.mark.parametrize(
    ("launchers", "generation", "start"),
    list(itertools.product(MEMBERSHIPS, (0, 4), ("fork", "spawn", "exec"))),
)
def test_keystone_detect_equals_what_the_plan_meant(launchers, generation, start):
    ranks, nodes = launchers
    # What the user's shell may hold already must not shine through.
    shell = {"RANK": "9", "WORLD_SIZE": "77", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "8"}
    first = 0
    for index, n in enumerate(ranks):
        made = plan(
            LaunchSpec(target="train.py", n=n, start=start),
            environ=shell,
            membership=membership_of(ranks, nodes, index, interface="eth1"),
            port=29512,
            number=generation,
            max_restarts=4,
            run_id="run",
        )
        assert made.size == sum(ranks)
        assert [worker.rank for worker in made.workers] == list(range(first, first + n))
        before = sum(ranks[other] for other in range(index) if nodes[other] == nodes[index])
        local_size = sum(n for n, node in zip(ranks, nodes, strict=True) if node == nodes[index])
        for number, worker in enumerate(made.workers):
            assert detect({**shell, **worker.env}) == World(
                rank=first + number,
                size=sum(ranks),
                local_rank=before + number,
                local_size=local_size,
                node_rank=nodes[index],
                node_count=len(set(nodes)),
                address="10.0.0.1",
                port=29512,
                generation=generation,
                agent_store=sum(ranks) > 1,
                environment="lockstep",
                reason="LOCKSTEP_LAUNCHER is set",
            )
            assert worker.env["LOCAL_RANK"] == str(worker.local_rank)
        first += n


def test_the_interface_of_the_nodes_is_for_all_libraries_but_never_against_the_user():
    spec = LaunchSpec(target="train.py", n=2)
    both = membership_of((2, 2), (0, 1), 0, interface="eth1")
    (env, _) = (worker.env for worker in plan(spec, membership=both).workers)
    assert {env[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL", "TP")} == {"eth1"}
    own = {"GLOO_SOCKET_IFNAME": "ib0"}
    (env, _) = (worker.env for worker in plan(spec, environ=own, membership=both).workers)
    assert "GLOO_SOCKET_IFNAME" not in env
    assert "NCCL_SOCKET_IFNAME" in env


def test_workers_share_nothing_that_is_their_own():
    workers = plan(LaunchSpec(target="train.py", n=4)).workers
    for value in ("rank", "log", "error_file"):
        assert len({getattr(worker, value) for worker in workers}) == 4


def test_error_files_of_generations_differ():
    files = {plan(LaunchSpec(target="a.py"), number=k).workers[0].error_file for k in range(3)}
    assert len(files) == 3


@pytest.mark.parametrize(
    ("n", "devices", "machine", "expected"),
    [
        (3, None, LAPTOP, 3),
        ("cpu", None, LAPTOP, 8),
        ("auto", None, LAPTOP, 8),
        ("auto", None, SERVER, 4),
        ("gpu", None, SERVER, 4),
        ("auto", "cpu", SERVER, 64),
        ("cpu", None, SERVER, 64),
        (128, None, LAPTOP, 128),
        (128, "cpu", SERVER, 128),
    ],
)
def test_number_of_ranks(n, devices, machine, expected):
    assert (
        count_ranks(
            LaunchSpec(target="a.py", n=n, settings=FlagSettings(devices=devices)), machine, {}
        )
        == expected
    )


@pytest.mark.parametrize(
    ("n", "devices", "machine", "environ", "error", "said"),
    [
        ("gpu", None, LAPTOP, {}, DeviceError, "torch sees none"),
        (1, "gpu", LAPTOP, {}, DeviceError, "torch sees none"),
        (1, None, LAPTOP, {"LOCKSTEP_DEVICES": "gpu"}, DeviceError, "torch sees none"),
        (5, None, SERVER, {}, DeviceError, "5 ranks, but this machine has 4 GPU"),
        (5, "gpu", SERVER, {}, DeviceError, "--devices cpu"),
        (129, None, LAPTOP, {}, DeviceError, "at most 16 ranks for each"),
        ("gpu", "cpu", SERVER, {}, UsageError, "contradict"),
        (1, None, LAPTOP, {"LOCKSTEP_DEVICES": "abacus"}, UsageError, "'abacus'"),
    ],
)
def test_refused_layouts(n, devices, machine, environ, error, said):
    with pytest.raises(error) as caught:
        count_ranks(
            LaunchSpec(target="a.py", n=n, settings=FlagSettings(devices=devices)), machine, environ
        )
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("devices", "machine", "expected"),
    [
        (None, LAPTOP, ["cpu", "cpu"]),
        (None, SERVER, ["cuda:0", "cuda:1"]),
        ("cpu", SERVER, ["cpu", "cpu"]),
    ],
)
def test_placement(devices, machine, expected):
    workers = plan(
        LaunchSpec(target="a.py", n=2, settings=FlagSettings(devices=devices)), machine
    ).workers
    assert [worker.device for worker in workers] == expected


def test_a_rank_that_is_left_out_takes_its_device_with_it():
    spec = LaunchSpec(target="a.py", n=4)
    alone = {"membership": Membership.alone(2), "left_out": (0, 2)}
    workers = plan(spec, SERVER, **alone).workers
    assert [worker.device for worker in workers] == ["cuda:1", "cuda:3"]
    assert [worker.env["LOCKSTEP_DEVICE"] for worker in workers] == ["cuda:1", "cuda:3"]
    for name in ("RANK", "LOCAL_RANK"):
        assert [worker.env[name] for worker in workers] == ["0", "1"]
    assert {worker.env["LOCKSTEP_LEFT_OUT"] for worker in workers} == {"0,2"}
    assert {worker.env["WORLD_SIZE"] for worker in workers} == {"2"}
    on_cores = [worker.env for worker in plan(spec, **alone).workers]
    assert ["LOCKSTEP_DEVICE" in env for env in on_cores] == [False, False]


@pytest.mark.parametrize(
    ("threads", "environ", "expected"),
    [
        (None, {}, "4"),
        (None, {"OMP_NUM_THREADS": "7"}, None),
        (3, {"OMP_NUM_THREADS": "7"}, "3"),
        (None, {"LOCKSTEP_THREADS": "5"}, "5"),
    ],
)
def test_threads(threads, environ, expected):
    worker = plan(
        LaunchSpec(target="a.py", n=2, settings=FlagSettings(threads=threads)), environ=environ
    ).workers[0]
    assert worker.env.get("OMP_NUM_THREADS") == expected


def test_more_ranks_than_cores_get_one_thread():
    assert plan(LaunchSpec(target="a.py", n=9)).workers[0].env["OMP_NUM_THREADS"] == "1"


def test_flags_become_variables_only_where_given():
    bare = plan(LaunchSpec(target="a.py", n=2)).workers[0].env
    assert {name for name in bare if name.startswith("LOCKSTEP_")} == {
        "LOCKSTEP_LAUNCH",
        "LOCKSTEP_LAUNCHER",
        "LOCKSTEP_LOG_DIR",
        "LOCKSTEP_RUN_DIR",
        "LOCKSTEP_STORE",
        "LOCKSTEP_TOKEN",
    }
    spec = LaunchSpec(
        target="a.py",
        n=2,
        settings=FlagSettings(replicas=4, threads=2, devices="cpu", fresh=True, stop_on_nan=True),
    )
    env = plan(spec).workers[1].env
    names = ("REPLICAS", "THREADS", "DEVICES", "FRESH", "STOP_ON_NAN")
    assert [env[f"LOCKSTEP_{name}"] for name in names] == ["4", "2", "cpu", "1", "1"]


@pytest.mark.parametrize(
    ("replicas", "environ"),
    [(2, {}), (None, {"LOCKSTEP_REPLICAS": "2"}), (2, {"LOCKSTEP_REPLICAS": "8"})],
)
def test_fewer_replicas_than_ranks_are_refused(replicas, environ):
    with pytest.raises(UsageError, match="3 ranks for 2 replica"):
        plan(
            LaunchSpec(target="a.py", n=3, settings=FlagSettings(replicas=replicas)),
            environ=environ,
        )


def test_a_mesh_for_a_script_that_names_its_strategy():
    spec = LaunchSpec(target="a.py", n=4, settings=FlagSettings(mesh="2x2"))
    assert plan(spec, environ={"LOCKSTEP_REPLICAS": "2"}) is not None
    with pytest.raises(UsageError, match="2 ranks for 1 replica"):
        plan(spec, environ={"LOCKSTEP_REPLICAS": "1"})
    with pytest.raises(UsageError, match="a mesh of 2x2 has 4 ranks; the run has 3"):
        plan(LaunchSpec(target="a.py", n=3, settings=FlagSettings(mesh="2x2")), environ={})
    with pytest.raises(UsageError, match="strategy=ddp gives each rank a whole one"):
        plan(
            LaunchSpec(target="a.py", n=4, settings=FlagSettings(mesh="2x2", strategy="ddp")),
            environ={},
        )


def test_replicas_that_are_no_number_are_refused():
    with pytest.raises(UsageError, match="LOCKSTEP_REPLICAS is 'many'"):
        plan(LaunchSpec(target="a.py"), environ={"LOCKSTEP_REPLICAS": "many"})


@pytest.mark.parametrize(
    ("machine", "environ", "nodes", "expected"),
    [
        (LAPTOP, {}, (0, 0), "lo"),
        (LAPTOP, {"GLOO_SOCKET_IFNAME": "eth7"}, (0, 0), None),
        (Machine(cores=1, loopback=None), {}, (0, 0), None),
        (LAPTOP, {}, (0, 1), None),
    ],
)
def test_a_single_node_stays_on_loopback(machine, environ, nodes, expected):
    membership = membership_of((1, 1), nodes, 0)
    worker = plan(LaunchSpec(target="a.py"), machine, environ, membership=membership).workers[0]
    assert worker.env.get("GLOO_SOCKET_IFNAME") == expected


def test_legacy_option_comes_first():
    spec = LaunchSpec(target="a.py", args=("x",), local_rank_option="--local_rank")
    assert arguments(spec, 3) == ("--local_rank=3", "x")


@pytest.mark.parametrize(
    ("start", "kind", "tail"),
    [
        ("fork", "script", ["a.py", "x"]),
        ("exec", "module", ["-m", "a.py", "x"]),
        ("spawn", "script", ["-m", "lockstep.launch.agent.bootstrap", "script", "a.py", "x"]),
        ("spawn", "module", ["lockstep.launch.agent.bootstrap", "--seeded", "module", "a.py", "x"]),
    ],
)
def test_commands(start, kind, tail):
    spec = LaunchSpec(target="a.py", kind=kind, args=("x",), start=start)
    launch = resolve(spec, Sources(uses_lockstep="--seeded" in tail), LAPTOP, {})
    assert list(command(launch, 0))[-len(tail) :] == tail


def test_launchers_that_share_a_node_share_what_they_have_in_common():
    spec = LaunchSpec(target="train.py", n=2)
    second = membership_of((2, 2), (0, 0), 1)
    # Four cores and four GPUs for both launchers: the second one takes the second half.
    both = Machine(cores=4, gpus=4)
    devices = [worker.device for worker in plan(spec, both, membership=second).workers]
    assert devices == ["cuda:2", "cuda:3"]
    assert plan(spec, both, membership=second).workers[0].env["OMP_NUM_THREADS"] == "1"
    # Two of each for this one alone, as Slurm gives them to a task.
    alone = Machine(cores=2, gpus=2)
    made = plan(
        spec,
        alone,
        environ={"CUDA_VISIBLE_DEVICES": "0,1"},
        membership=replace(second, own_cores=True, own_gpus=True),
    )
    assert [worker.device for worker in made.workers] == ["cuda:0", "cuda:1"]
    assert [worker.env["LOCKSTEP_DEVICE"] for worker in made.workers] == ["cuda:0", "cuda:1"]
    assert [worker.env["LOCAL_RANK"] for worker in made.workers] == ["2", "3"]


def test_a_shell_that_names_an_environment_does_not_speak_for_the_workers():
    for name in ("single", "slurm"):
        environ = {"LOCKSTEP_ENVIRONMENT": name}
        made = plan(LaunchSpec(target="train.py", n=2), environ=environ, port=29512)
        for worker in made.workers:
            assert detect({**environ, **worker.env}).size == 2


def test_a_launch_in_a_rank_does_not_take_over_the_store_and_token_of_that_rank():
    (worker,) = plan(LaunchSpec(target="train.py")).workers
    assert (worker.env["LOCKSTEP_STORE"], worker.env["LOCKSTEP_TOKEN"]) == ("", "")


def test_an_interface_chosen_for_lockstep_wins_over_gloos_own():
    own = {"GLOO_SOCKET_IFNAME": "ib0"}
    both = membership_of((1, 1), (0, 1), 0, interface="eth1", overrules_interface=True)
    (worker,) = plan(LaunchSpec(target="train.py"), environ=own, membership=both).workers
    assert worker.env["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_mesh_has_the_ranks_of_all_nodes_and_fits_them_when_they_have_met():
    nodes = Nodes(count=2, rank=0, main_address="10.0.0.1")
    mesh = FlagSettings(strategy="pipeline", mesh="1x2")
    spec = LaunchSpec(target="train.py", n=1, nodes=nodes, settings=mesh)
    assert plan(spec, membership=membership_of((1, 1), (0, 1), 0)).size == 2
    with pytest.raises(UsageError, match="a mesh of 1x2 has 2 ranks; the run has 3"):
        plan(spec, membership=membership_of((1, 2), (0, 1), 0))
    with pytest.raises(UsageError, match="a mesh of 1x2 has 2 ranks; the run has 1"):
        plan(LaunchSpec(target="train.py", n=1, settings=mesh))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (FlagSettings(mesh="2x2", strategy="ddp"), "strategy=ddp gives each rank a whole one"),
        (FlagSettings(mesh="4x1", replicas=3), "4 ranks for 3 replica"),
    ],
)
def test_what_a_mesh_over_several_nodes_has_wrong_is_said_before_they_meet(settings, said):
    nodes = Nodes(count=2, rank=0, main_address="10.0.0.1")
    spec = LaunchSpec(target="train.py", n=2, nodes=nodes, settings=settings)
    with pytest.raises(UsageError, match=said):
        resolve(spec, Sources(), LAPTOP, {})
