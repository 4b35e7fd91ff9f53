"""Ray's internals are as `rlhf_ray.internals.ray` describes them."""

import inspect
import mmap
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._common import constants
from ray._private import node, services, state, utils, worker
from ray._private.runtime_env import constants as environment_constants
from ray._private.runtime_env import packaging
from ray.core.generated.common_pb2 import JobConfig
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY
from ray.experimental import internal_kv

from rlhf_ray.internals import ray as internals

HOME = Path(ray.__file__).parent
READ_AGAIN = "Ray has changed: read rlhf_ray/internals/ray.py against its sources"


@pytest.mark.parametrize(("binary", "text"), [
    ("_raylet.so", internals.RECONNECT_TIMEOUT.removeprefix("RAY_")),
    ("_raylet.so", internals.LOSE_MESSAGES.removeprefix("RAY_")),
    ("_raylet.so", internals.CALL_MESSAGE),
    ("_raylet.so", internals.CHECK_ALIVE),
    *(("_raylet.so", name) for name in internals.start_options(1, 2, 3)["_system_config"]),
    ("core/src/ray/raylet/raylet", internals.DEATH),
    *(("core/src/ray/raylet/raylet", name.removeprefix("RAY_")) for name in internals.NO_PRESTART),
])
def test_names_and_messages_are_in_ray_s_binaries(binary, text):
    with (HOME / binary).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(text.encode()) >= 0, f"{READ_AGAIN}: {text}"


def test_names_of_constants():
    assert constants.HEAD_NODE_RESOURCE_NAME == internals.HEAD_RESOURCE
    assert packaging.default_logger.name == internals.PACKAGING_LOGGER


def test_the_message_of_a_slow_start():
    texts = "".join(re.findall(r'"([^"]*)"', inspect.getsource(node.Node.__init__)))
    assert internals.SLOW_START in texts, READ_AGAIN


def test_values_are_written_read_and_deleted_by_their_beginning(monkeypatch):
    class Service:
        """Stands in for the client of the control service."""

        def __init__(self):
            self.values = {}

        def internal_kv_put(self, key, value, overwrite, namespace):
            self.values[key] = value

        def internal_kv_get(self, key, namespace):
            return self.values.get(key)

        def internal_kv_del(self, key, by_prefix, namespace):
            assert by_prefix
            self.values = {k: v for k, v in self.values.items() if not k.startswith(key)}

    monkeypatch.setattr(internal_kv, "global_gcs_client", Service())
    internals.put_value("a/1", "7")
    internals.put_value("b/1", "8")
    assert internals.get_value("a/1") == "7" and internals.get_value("a/2") is None
    internals.delete_values("a/")
    assert internals.get_value("a/1") is None and internals.get_value("b/1") == "8"


def test_the_state_of_nodes_is_asked_for_without_arguments(monkeypatch):
    for answer in (state.available_resources_per_node, state.state.get_draining_nodes):
        inspect.signature(answer).bind()
    monkeypatch.setattr(state.state, "available_resources_per_node", lambda: {"n": {"CPU": 1.0}})
    monkeypatch.setattr(state.state, "get_draining_nodes", lambda: {"n": 5})
    assert internals.free_resources() == {"n": {"CPU": 1.0}} and internals.drain_deadlines() == {"n": 5}


def test_a_process_without_a_session_knows_no_dashboard(monkeypatch):
    assert hasattr(node.Node, "webui_url") and hasattr(node.Node, "get_logs_dir_path"), READ_AGAIN
    assert "_global_node" in vars(worker), READ_AGAIN
    monkeypatch.setattr(worker, "_global_node", None)
    assert internals.dashboard_and_logs() == (None, None)


def test_a_local_cluster_takes_the_options():
    code = inspect.getsource(worker.init)
    assert [name for name in internals.start_options(1, 2, 3) if f'kwargs.pop("{name}"' not in code] == [], READ_AGAIN


@pytest.mark.parametrize("own", [True, False])
def test_ray_s_processes_are_in_groups_of_their_own(own):
    if own:
        with internals.own_process_groups():
            started = services.start_ray_process(["sleep", "60"], "test", fate_share=False)
    else:
        started = services.start_ray_process(["sleep", "60"], "test", fate_share=False)
    try:
        assert (os.getpgid(started.process.pid) == started.process.pid) == own, READ_AGAIN
    finally:
        started.process.kill()
        started.process.wait()


def test_ray_s_processes_get_variables_that_this_one_has_not(monkeypatch, tmp_path):
    monkeypatch.setattr(services, "start_ray_process", services.start_ray_process)
    internals.start_processes_with({"LOST": "none"})
    command = ["sh", "-c", f"echo $LOST $MORE > {tmp_path}/seen"]
    services.start_ray_process(command, "test", fate_share=False, env_updates={"MORE": "x"}).process.wait()
    assert (tmp_path / "seen").read_text() == "none x\n" and "LOST" not in os.environ


def test_messages_about_deaths_are_left_out(monkeypatch):
    printed = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, **_: printed.extend(data["lines"]))
    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names, READ_AGAIN
    with internals.hidden_death_messages():
        for line in (f"{internals.DEATH}. See the logs.", "The object store is full."):
            worker.print_to_stdstream({"lines": [line]}, ignore_prefix=False)
    assert printed == ["The object store is full."]


def test_a_package_is_what_no_pattern_leaves_out(tmp_path):
    for name in ("a.py", "data/b.bin", "runs/c", ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("*.bin\n")
    files = internals.packed_files(tmp_path, ["/runs/"])
    assert {path.relative_to(tmp_path).as_posix() for path in files} == {"a.py", ".gitignore"}
    assert internals.largest_package() > 2**20


def test_a_driver_s_environment_names_its_job():
    text = f'{{"metadata": {{"{JOB_ID_METADATA_KEY}": "raysubmit_1"}}}}'
    name = environment_constants.RAY_JOB_CONFIG_JSON_ENV_VAR
    assert internals.job_of_process({name: text}) == "raysubmit_1"
    assert internals.job_of_process({name: "{}"}) is None and internals.job_of_process({}) is None
    job = (HOME / "dashboard/modules/job/job_supervisor.py").read_text()
    assert re.search(r"RAY_JOB_CONFIG_JSON_ENV_VAR: json\.dumps\(", job), READ_AGAIN


def test_a_client_of_the_job_server_asks_with_its_token_and_knows_the_version():
    class Client(SubmissionClient):
        def _do_request(self, method, endpoint):
            return method, endpoint

    client = Client("http://127.0.0.1:9")
    inspect.signature(SubmissionClient._do_request).bind(client, "GET", "/x")
    assert internals.get_from_job_server(client, "/x") == ("GET", "/x") and internals.version_of_server(client) == ""
    client._server_ray_version = "2.60.0"
    assert internals.version_of_server(client) == "2.60.0"
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(SubmissionClient._do_request).parameters.values()), (
        READ_AGAIN)
    check = SubmissionClient._check_connection_and_version_with_url
    assert "_server_ray_version" in check.__code__.co_names, READ_AGAIN


@pytest.mark.parametrize("searched", [False, True])
def test_workers_search_the_driver_s_directories_only_if_it_does(tmp_path, monkeypatch, searched):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*(["", "/script"] if searched else []), "/elsewhere"])
    job = internals.job_config({"a": "b"})
    assert "_py_driver_sys_path.extend" in inspect.getsource(worker.connect), READ_AGAIN
    job._py_driver_sys_path.extend(["/script", str(tmp_path)])
    sent = JobConfig.FromString(job._serialize())
    assert list(sent.py_driver_sys_path) == (["/script", str(tmp_path)] if searched else [])
    assert dict(sent.metadata) == {"a": "b"}


@pytest.mark.parametrize("handles", [False, True])
def test_ray_s_handler_of_sigterm_does_not_replace_one_of_the_driver(handles):
    assert "set_sigterm_handler" in inspect.getsource(worker.init), READ_AGAIN
    before = signal.getsignal(signal.SIGTERM)
    ours = (lambda *_: None) if handles else signal.SIG_DFL
    try:
        signal.signal(signal.SIGTERM, ours)
        with internals.kept_sigterm_handler():
            utils.set_sigterm_handler(lambda *_: "Ray's")
        assert (signal.getsignal(signal.SIGTERM) is ours) == handles
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ray_s_processes_get_more_variables_while_they_are_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "kept")
    with internals.own_process_groups({"PYTHONSAFEPATH": "1"}):
        services.start_ray_process(["sh", "-c", f"echo $PYTHONSAFEPATH $OURS > {tmp_path}/seen"], "test",
                                   fate_share=False).process.wait()
    assert (tmp_path / "seen").read_text() == "1 kept\n" and "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_the_temporary_directory_is_ray_s(monkeypatch, variable):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, "/other")
    assert internals.temporary_directory() == Path("/other")


def test_the_longest_socket():
    """Its parts in Ray's sources; `tests/cluster/test_shutdown.py` and others start clusters in short directories."""
    from ray.dashboard.subprocesses import utils as subprocesses

    modules = re.findall(r"class (\w+)\(SubprocessModule", "".join(
        file.read_text() for file in (HOME / "dashboard/modules").rglob("*_head.py")))
    longest = max(len(subprocesses.get_socket_path("", name).lstrip("/")) for name in modules)
    for dashboard, length in ((True, longest), (False, len("plasma_store"))):
        path = internals.longest_socket(Path("/tmp"), dashboard)
        assert len(Path(path).name) == length and path.startswith("/tmp/ray/session_"), READ_AGAIN
    assert 'default_prefix="plasma_store"' in inspect.getsource(node), READ_AGAIN
    assert re.search(r"%Y-%m-%d_%H-%M-%S_%f", inspect.getsource(node)), READ_AGAIN


def test_a_new_token_is_written_where_ray_writes_it(monkeypatch, tmp_path):
    from ray._private.authentication import authentication_token_setup as setup

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ray._raylet.AuthenticationTokenLoader", SimpleNamespace(
        instance=lambda: SimpleNamespace(has_token=lambda ignore_auth_mode: (tmp_path / ".ray/auth_token").exists())))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert internals.new_token_file() is None
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert internals.new_token_file() == tmp_path / ".ray/auth_token"
    setup.generate_and_save_token()
    token = tmp_path / ".ray/auth_token"
    assert token.is_file() and internals.new_token_file() is None
    rays = token.read_text()
    internals.write_token(token)
    assert token.read_text() == rays  # an existing one stays
    token.unlink()
    internals.write_token(token)
    assert re.fullmatch("[0-9a-f]{64}", token.read_text()) and token.stat().st_mode & 0o777 == 0o600
    assert list(token.parent.iterdir()) == [token]
    assert internals.where_the_token_is() == "`ray get-auth-token` prints it"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/a b")
    assert internals.where_the_token_is() == "`RAY_AUTH_TOKEN_PATH='/a b' ray get-auth-token` prints it"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123secret")
    assert internals.where_the_token_is() == "the value of RAY_AUTH_TOKEN"
    assert "get_raw_token(ignore_auth_mode=True)" in (HOME / "scripts/scripts.py").read_text(), READ_AGAIN


def test_the_answers_of_a_job_server_without_an_agent():
    jobs = HOME / "dashboard/modules/job"
    assert internals.NO_AGENT in (jobs / "job_head.py").read_text(), READ_AGAIN
    assert internals.JOB_EXISTS in (jobs / "job_manager.py").read_text(), READ_AGAIN
