"""Which files of /dev/shm go with processes that are killed: their shared memory, and nothing that a person keeps."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from rlhf_ray.cluster import shared_memory as module
from rlhf_ray.cluster.processes import kill
from tests.cluster.processes import abandoned, shared_memory

MAPS = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)"
MAKES = f"import sys; open(sys.argv[1], 'wb').write(bytes(4096)); {MAPS}"


@pytest.fixture
def killed_after():
    """Runs a program with a path until it sleeps, and kills it as a worker is killed."""
    started = []

    def run(program, path):
        code = f"{program}\nprint('.', flush=True)\nimport time\ntime.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == ".\n"
        kill([(process.pid, psutil.Process(process.pid).create_time())])

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_shared_memory_that_a_killed_process_made_goes_with_it(killed_after):
    segment = Path(module.SHM) / f"rlhf-ray-test-{uuid4().hex}"
    killed_after(MAKES, segment)
    assert not segment.exists()


def test_a_file_that_was_there_before_stays(killed_after, monkeypatch):
    monkeypatch.setattr(module, "CLOCKS_S", 0.0)
    with tempfile.NamedTemporaryFile(dir=module.SHM) as model:
        model.write(bytes(4096))
        model.flush()
        time.sleep(1.5)  # the kernel tells when a process began by a clock of whole seconds
        killed_after(MAPS, model.name)
        assert Path(model.name).exists()


def test_a_new_file_in_somebodys_directory_stays(killed_after):
    with tempfile.TemporaryDirectory(dir=module.SHM) as cache:
        rows = Path(cache) / "rows.arrow"
        killed_after(MAKES, rows)
        assert rows.exists()


def test_of_a_semaphore_tests_say_that_it_is_left_when_nobody_uses_it_any_more():
    name, before = f"left-{os.getpid()}", shared_memory()
    code = f"import _multiprocessing as m; s = m.SemLock(0, 1, 1, '/{name}', False); print(flush=True); input()"
    maker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        maker.stdout.readline()
        assert f"sem.{name}" in shared_memory() - before and f"sem.{name}" not in abandoned(before, wait_s=0)
        maker.kill()
        maker.communicate()
        assert f"sem.{name}" in abandoned(before, wait_s=0)
    finally:
        maker.kill()
        Path(module.SHM, f"sem.{name}").unlink(missing_ok=True)
