"""Manifests for Kubernetes: the schemas that they keep, and what a run needs of them."""

from __future__ import annotations

import re
from typing import Any

import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import pytest
import yaml

from lockstep.cli import main
from tests.pods import expand

KINDS = ("job", "jobset", "trainjob", "pytorchjob")
NEEDED = ("--image", "r/i:1", "--memory", "8Gi", "--volume", "claim:/data")
#: The newest Kubernetes whose strict schemas are known here.
VERSION = kubernetes_validate.latest_version()


@pytest.fixture
def manifests(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the manifests that `lockstep submit` prints."""

    def printed(kind: str, *flags: str, script: tuple[str, ...] = ("train.py",)) -> Any:
        words = ["submit", "--kubernetes", kind, *NEEDED, "--nodes", "3", "-n", "2", *flags]
        assert main([*words, *script]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return printed


def validate(manifest: Any) -> None:
    """Validate against the schema of Kubernetes, which knows no further field."""
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def job_spec(manifests: list[Any]) -> Any:
    """Return the spec of the Indexed Job in a manifest of any kind but PyTorchJob."""
    spec = (
        manifests[0]["spec"] if manifests[0]["kind"] == "TrainingRuntime" else manifests[-1]["spec"]
    )
    spec = spec["template"]["spec"] if "mlPolicy" in spec else spec
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def pod_templates(manifests: list[Any]) -> list[Any]:
    if manifests[-1]["kind"] == "PyTorchJob":
        return [one["template"] for one in manifests[-1]["spec"]["pytorchReplicaSpecs"].values()]
    return [job_spec(manifests)["template"]]


def test_a_job_and_its_service_keep_the_strict_schemas(manifests):
    service, job = manifests("job", "--gpus", "2", "--namespace", "team")
    for one in (service, job):
        validate(one)
        assert one["metadata"]["namespace"] == "team"
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    with pytest.raises(kubernetes_validate.ValidationError):  # the schemas are strict
        validate(job | {"spec": job["spec"] | {"podReplacementPolice": "Failed"}})


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_all_kinds_keep_the_strict_schema_and_the_restricted_standard(manifests, kind):
    for template in pod_templates(manifests(kind, "--gpus", "2")):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **template}
        validate(pod)
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        limits = {"memory": "8Gi", "cpu": "2", "nvidia.com/gpu": "2"}
        assert container["resources"] == {"limits": limits, "requests": limits}
        volumes = {one["name"]: one for one in spec["volumes"]}
        mounted = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert mounted["/tmp"]["emptyDir"] == mounted["/home/lockstep"]["emptyDir"] == {}
        assert mounted["/data"]["persistentVolumeClaim"] == {"claimName": "claim"}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_one_pod_is_replaced_while_the_others_run(manifests, kind):
    spec = job_spec(manifests(kind))
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec}
    validate(job)
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (3, 3, 30)
    assert spec["podReplacementPolicy"] == "Failed"
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75, 143]}},
    ]


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("job", "train-0.train"),
        ("jobset", "train-node-0-0.train"),
        ("trainjob", "train-node-0-0.train"),
        ("pytorchjob", "train-master-0"),
    ],
)
def test_the_command_is_a_list_that_no_shell_reads(manifests, kind, host):
    given = ("train.py", "$HOME", "$(RANK)", "a $$ b", "")
    for template in pod_templates(manifests(kind, "--min-nodes", "2", script=given)):
        environ = {"JOB_COMPLETION_INDEX": "1", "PET_NODE_RANK": "1"}
        command = [expand(word, environ) for word in template["spec"]["containers"][0]["command"]]
        assert command == [
            *("lockstep", "run", "--nnodes", "2:3", "--node-rank", "1", "--master-addr", host),
            *("-n", "2", "--run-dir", "/data/runs/train", *given),
        ]


def test_one_node_needs_no_rendezvous(manifests):
    (job,) = manifests("job", "--nodes", "1", "--gpus", "amd.com/gpu:4")
    validate(job)
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "8Gi", "cpu": "2", "amd.com/gpu": "4"}
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == ["lockstep", "run", "-n", "2"]


def test_a_directory_as_rendezvous_replaces_the_first_pod(manifests):
    _, job = manifests("job", "--rdzv-endpoint", "file:///data/meet")
    words = " ".join(job["spec"]["template"]["spec"]["containers"][0]["command"])
    assert "--nnodes 1:3 --rdzv-endpoint file:///data/meet -n 2" in words


def test_the_grace_period_is_the_time_to_save(manifests):
    (grace,) = {
        template["spec"]["terminationGracePeriodSeconds"]
        for template in pod_templates(manifests("pytorchjob", "--save-before", "600"))
    }
    assert grace == 600
    assert job_spec(manifests("job"))["template"]["spec"]["terminationGracePeriodSeconds"] == 90


def test_a_jobset_and_a_trainjob_keep_the_models_of_kubeflow(manifests):
    (jobset,) = manifests("jobset")
    spec = trainer.JobsetV1alpha2JobSetSpec.from_dict(jobset["spec"])
    assert spec is not None
    assert spec.to_dict() == jobset["spec"]  # so no field is unknown to the model
    runtime, job = manifests("trainjob", "--gpus", "2")
    for made, model in (
        (runtime, trainer.TrainerV1alpha1TrainingRuntime),
        (job, trainer.TrainerV1alpha1TrainJob),
    ):
        read = model.from_dict(made)
        assert read is not None
        assert read.to_dict() == made
    assert job["spec"]["runtimeRef"] == {
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 3


def test_a_pytorchjob_restarts_on_any_exit_code(manifests):
    # Structure by hand: no package has the schema of this kind.
    (job,) = manifests("pytorchjob")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() == {"runPolicy", "pytorchReplicaSpecs"}
    assert spec["runPolicy"] == {"backoffLimit": 30, "cleanPodPolicy": "Running"}
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 2}
    for one in replicas.values():
        assert one["restartPolicy"] == "OnFailure"
        assert [container["name"] for container in one["template"]["spec"]["containers"]] == [
            "pytorch"
        ]


def test_equal_requests_give_equal_texts_without_references(capsys):
    texts = []
    for _ in range(2):
        assert main(["submit", "--kubernetes", "pytorchjob", *NEEDED, "--nodes", "2", "t.py"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert not re.search(r"[&*]id\d", texts[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", ""], "--image is missing; Kubernetes needs it"),
        (["--memory", ""], "--memory is missing; Kubernetes needs it"),
        (["--volume", ""], "--volume is missing; Kubernetes needs it"),
        (["--memory", "32GB"], "--memory is '32GB'; expected a number and a unit, k, M"),
        (["--memory", "32"], "--memory is '32'; expected a number and a unit"),
        (["--volume", "claim"], "--volume mounts claim at ''; expected an absolute path"),
        (["--volume", "Claim:/data"], "the claim in --volume is 'Claim'; expected a-z, 0-9 and -"),
        (
            ["--job-name", "My_Job"],
            "--job-name is 'My_Job'; expected a-z, 0-9 and -, a letter first",
        ),
        (["--job-name", "x" * 41], "at most 40 characters"),
        (["--job-name", "-"], "--job-name is '-'"),
        (["--namespace", "a/b"], "--namespace is 'a/b'"),
        (["--min-nodes", "3"], "--min-nodes is 3 with --nodes 2; expected 1 to 2"),
        (["--min-nodes", "0"], "--min-nodes is 0"),
        (["--user", "0"], "--user is 0; expected at least 1: containers do not run as root"),
        (
            ["--run-dir", "/elsewhere"],
            "--run-dir is /elsewhere; expected a directory in the volume at",
        ),
        (["-n", "cpu"], "-n is cpu; expected a number: the limits of a pod have a number of cores"),
        (
            ["--gpus", "a100:4"],
            "--gpus is 'a100:4'; expected a number, or a resource of Kubernetes",
        ),
        (["--time", "30"], "--time has no meaning on Kubernetes"),
        (["--apply", "--dry-run"], "--apply and --dry-run contradict each other"),
        (["--partition", "gpu"], "--partition is a flag of slurm, and the backend is kubernetes"),
    ],
)
def test_what_cannot_work(words, said, capsys):
    given = ["submit", "--kubernetes", "job", *NEEDED, "--nodes", "2", *words, "train.py"]
    assert main(given) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out


def test_flags_of_kubernetes_without_kubernetes(capsys):
    assert main(["submit", "--image", "i", "train.py"]) == 2
    assert "--image is a flag of kubernetes, and the backend is slurm" in capsys.readouterr().err


def test_the_default_name_is_made_from_the_scripts(manifests):
    for script, name in (("Train_Model.py", "train-model"), ("01_x.py", "run-01-x")):
        assert manifests("job", script=(script,))[-1]["metadata"]["name"] == name
