"""A worker from a template is the process that it would be by itself, and it runs once, whatever becomes of the
template."""

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rlhf_ray.cluster import forked_worker, worker_template
from rlhf_ray.cluster.worker_templates import (
    LIBRARIES,
    VLLM_LIBRARIES,
    WorkerTemplates,
    open_templates,
    template_command,
)

MODULE = """
import os, tempfile

os.environ["SET"] = "by the import"
os.environ.setdefault("OWN", "by the import")
tempfile.gettempdir()
"""
"""What templates import here."""
PROGRAM = """
import json, multiprocessing, os, resource, signal, sys, tempfile, threading
import module_of_workers

class OfMain:
    pass

def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask

def child():
    sys.exit(7)

if __name__ == "__main__":
    main = sys.modules["__main__"]
    facts = {
        "arguments": sys.argv, "environment": dict(os.environ), "directory": os.getcwd(), "umask": umask(),
        "main": [main.__file__, main.__name__, main.__spec__, main.OfMain is OfMain], "tmp": tempfile.gettempdir(),
        "limits": [resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "oom": open("/proc/self/oom_score_adj").read(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "input": sys.stdin.read(),
        "handlers": [str(signal.getsignal(each)) for each in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE)],
        "files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
        "flags": str(sys.flags), "executable": sys.executable, "started by": os.getppid(),
        "session is own": os.getsid(0) == os.getpid(), "children end with": []}
    for method in sys.argv[1:]:
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        facts["children end with"].append(process.exitcode)
    print("complaint", file=sys.stderr)
    print(json.dumps(facts))
"""


@contextmanager
def templates_of(folder):
    """command(*modules, **environment) of programs whose template imports modules of a folder."""
    with open_templates() as templates:
        def command(*modules, **environment):
            given = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder), **environment}
            return shlex.split(templates.command(given, modules or ("module_of_workers",)))

        yield command


@pytest.fixture
def folder(tmp_path):
    """One with what templates import, and a program."""
    (tmp_path / "module_of_workers.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "small.py").write_text("import os, sys; print(os.getppid(), *sys.argv[1:])")
    return tmp_path


def environment_of(folder, **more):
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder), **more}


def run(command, folder, *arguments, program="small.py", **options):
    """The words that a program printed, which the call waits for."""
    ended = subprocess.run([*command, str(folder / program), *arguments], text=True, capture_output=True, timeout=50,
                           **{"env": environment_of(folder), **options})
    return ended.stdout, ended.stderr


def pid_of_template():
    """Of the only one."""
    (found,) = {process for process in psutil.Process().children() if worker_template.__file__ in process.cmdline()}
    return found.pid


def test_a_forked_program_has_all_that_it_would_have_as_a_process_of_its_own(folder):
    place = folder / "a folder"
    place.mkdir()
    temporary = tempfile.TemporaryDirectory()  # a short name, for the socket of a fork server

    def conditions():
        os.umask(0o27)
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        Path("/proc/self/oom_score_adj").write_text("500")

    options = {"cwd": place, "preexec_fn": conditions, "input": "words", "program": "program.py",
               "env": environment_of(folder, OWN="worker's", TMPDIR=temporary.name, ODD="\udcff'\" ")}
    with temporary, templates_of(folder) as command:
        forked, complaint = run(command(OF_TEMPLATE="1"), folder, "spawn", "forkserver", "fork", **options)
        template = pid_of_template()
        plain, _ = run([sys.executable], folder, "spawn", "forkserver", "fork", **options)
    assert complaint == "complaint\n"
    facts, expected = json.loads(forked), json.loads(plain)
    assert (facts.pop("started by"), expected.pop("started by")) == (template, os.getpid())
    assert (facts.pop("session is own"), expected.pop("session is own")) == (True, False)
    assert facts == expected
    assert facts["environment"]["SET"] == "by the import" and facts["environment"]["OWN"] == "worker's"
    assert facts["children end with"] == [7, 7, 7]


def test_many_programs_at_once_run_once_each(folder):
    with templates_of(folder) as command:
        started = [subprocess.Popen([*command(), str(folder / "small.py"), str(number)], stdout=subprocess.PIPE,
                                    text=True, env=environment_of(folder)) for number in range(20)]
        said = [process.communicate(timeout=50)[0].split() for process in started]
        assert said == [[str(pid_of_template()), str(number)] for number in range(20)]


def test_programs_draw_different_numbers(folder):
    (folder / "small.py").write_text(
        "import random, numpy; print(random.random()); print(numpy.random.random())")
    with templates_of(folder) as command:
        first, second = (run(command("random", "numpy.random"), folder)[0].split() for _ in range(2))
    assert len({*first, *second}) == 4


def silent(caller):
    caller.recv(16)


def hasty(_):
    pass


def nonsense(caller):
    caller.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)


def no_request(caller):
    caller.sendall((2).to_bytes(4) + b"[]")


def half(caller):
    socket.send_fds(caller, [(1000).to_bytes(4)], [0, 1, 2])
    caller.sendall(b'{"arguments"')


@pytest.mark.parametrize("stays", [False, True], ids=["closes", "stays"])
@pytest.mark.parametrize("do", [silent, hasty, nonsense, no_request, half])
def test_a_caller_that_asks_for_nothing_holds_up_nobody(do, stays, folder):
    patient = "import sys; from rlhf_ray.cluster import worker_template as t; t.REQUEST_S = 0.2; "
    patient += "t.main('/nowhere', t.socket.socket(fileno=int(sys.argv[1])), [])"
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = f"{directory}/0"
        listener.bind(path)
        listener.listen()
        template = subprocess.Popen([sys.executable, "-c", patient, str(listener.fileno())], stdin=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, pass_fds=[listener.fileno()],
                                    env={**os.environ, "PYTHONPATH": os.getcwd()})
        try:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(path)
                do(caller)
                if not stays:
                    caller.close()
                said, _ = run([sys.executable, "-I", "-S", forked_worker.__file__, path, sys.executable], folder, "a")
            assert said.split() == [str(template.pid), "a"]
        finally:
            template.communicate(timeout=10)


def killed(command):
    started = command()
    os.kill(pid_of_template(), signal.SIGKILL)
    return started


def of_no_template(command):
    return [*command()[:-2], "/nowhere/0", sys.executable]


NO_WORKERS = {
    "a killed template": killed, "no socket": of_no_template, "an import that fails": lambda c: c("no_such_module"),
    "an import that ends the process": lambda c: c("ends"), "Ray": lambda c: c("ray")}


@pytest.mark.parametrize("case", NO_WORKERS)
def test_without_a_template_the_program_is_a_process_of_its_own(case, folder):
    (folder / "ray.py").write_text("")  # the real one takes a second
    (folder / "ends.py").write_text("import time, os; time.sleep(0.3); os._exit(1)")
    with templates_of(folder) as command:
        assert run(NO_WORKERS[case](command), folder, "a b", "c")[0] == f"{os.getpid()} a b c\n"


def test_a_template_that_is_not_ready_in_time_makes_no_second_process(folder):
    (folder / "slow.py").write_text("import time; time.sleep(1)")
    (folder / "small.py").write_text(f"import os; open({str(folder / 'ran')!r}, 'a').write(f'{{os.getppid()}} ')")
    hurried = ("import sys; from rlhf_ray.cluster import forked_worker as w; w.READY_S = 0.2;"
               "w.main(sys.argv[1], sys.argv[2], sys.argv[3:])")
    with templates_of(folder) as command:
        started = command("slow")
        run([sys.executable, "-c", hurried, *started[-2:]], folder,
            env=environment_of(folder, PYTHONPATH=os.getcwd()))
        run(started, folder)  # after it, since requests are answered in their order
        assert (folder / "ran").read_text().split() == [str(os.getpid()), str(pid_of_template())]


def test_a_template_that_ends_in_between_leaves_the_program_to_its_caller(folder):
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/0")
        listener.listen()

        def end():
            for bytes_read in (0, 4, 1 << 16):
                caller, _ = listener.accept()
                with caller:
                    caller.sendall(worker_template.READY)
                    if bytes_read:
                        caller.recv(bytes_read)

        thread = threading.Thread(target=end)
        thread.start()
        command = [sys.executable, "-I", "-S", forked_worker.__file__, f"{directory}/0", sys.executable]
        assert [run(command, folder, "a")[0] for _ in range(3)] == [f"{os.getpid()} a\n"] * 3
        thread.join()


def test_a_program_whose_caller_has_ended_does_not_run(folder):
    (folder / "late.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with templates_of(folder) as command:
        started = command()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(started[-2])
            caller.recv(16)
            template = psutil.Process(pid_of_template())
            template.suspend()
            body = json.dumps(forked_worker.request([str(folder / "late.py")])).encode()
            socket.send_fds(caller, [len(body).to_bytes(4)], [0, 1, 2])
            caller.sendall(body)
        template.resume()
        assert run(started, folder, "a")[0] == f"{template.pid} a\n"
        psutil.wait_procs(template.children(), timeout=20)
    assert not (folder / "ran").exists()


def test_a_directory_with_a_long_path_has_no_templates(folder, monkeypatch):
    (folder / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / ("long" * 30)))
    with open_templates() as templates:
        assert templates.command({}, ["json"]) is None


def test_workers_with_the_same_environment_and_libraries_share_a_template(folder):
    with templates_of(folder) as command:
        one = command(A="1")
        assert command(A="1", TMPDIR="/elsewhere", RAY_PROFILING="1") == one
        assert len({tuple(each) for each in (one, command(A="2"), command("json", A="1"))}) == 3


def test_templates_and_their_directory_end_with_the_outermost_block(folder):
    with templates_of(folder) as command:
        directory, template = Path(command()[-2]).parent, pid_of_template()
        with open_templates():
            assert template_command({"PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder)}, ["module_of_workers"])
        assert pid_of_template() == template and directory.is_dir()
    assert not psutil.pid_exists(template) and not directory.exists()
    assert template_command({}, ["json"]) is None


DRIVER = """
import sys, time
from rlhf_ray.cluster.worker_templates import open_templates

with open_templates() as templates:
    print(templates.command({}, ["json"]), flush=True)
    time.sleep(60)
"""


def test_a_template_ends_with_a_killed_driver_and_its_worker_does_not(folder):
    (folder / "stays.py").write_text("import sys; print(flush=True); sys.stdin.read(); print('ended')")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": os.getcwd()})
    command = shlex.split(driver.stdout.readline())
    worker = subprocess.Popen([*command, str(folder / "stays.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True)
    worker.stdout.readline()
    (template,) = psutil.Process(driver.pid).children()
    driver.kill()
    driver.communicate()
    template.wait(10)
    assert worker.communicate("", timeout=10)[0] == "ended\n"
    assert not Path(command[-2]).parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("libraries", [LIBRARIES, VLLM_LIBRARIES], ids=["most roles", "generators"])
def test_a_program_forked_from_a_template_with_its_libraries_has_one_thread_and_no_ray(libraries, folder):
    (folder / "small.py").write_text(
        "import os, sys; print(os.getppid(), len(os.listdir('/proc/self/task')), 'ray' in sys.modules)")
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": os.getcwd()}
    with templates_of(folder) as command:
        said = run(command(*libraries, **environment), folder, env=environment_of(folder, **environment))[0]
        threads = len(os.listdir(f"/proc/{pid_of_template()}/task"))
        assert (said.split(), threads) == ([str(pid_of_template()), "1", "False"], 1)


def test_a_template_that_fails_is_a_warning_at_the_end(tmp_path, caplog):
    templates = WorkerTemplates(tmp_path)
    templates.command({}, ["json", "no_such_module"])
    ((_, process),) = templates._started.values()
    process.wait(20)
    templates.end()
    (record,) = caplog.records
    assert "ended with exit code 1: ModuleNotFoundError: No module named 'no_such_module'" in record.getMessage()
