"""Measures the lines that a test's subprocess runs; lies beside the measured code as `sitecustomize.py`.

Python imports it as it starts. Environment: MUTANTS_MEASURE, a JSON object with `targets` (files) and `folder`, where
each process leaves one file: the test under way and {file: lines}.
"""

import atexit
import json
import os
import tempfile

if "MUTANTS_MEASURE" in os.environ and "PYTEST_CURRENT_TEST" in os.environ:
    from coverage import Coverage

    settings = json.loads(os.environ["MUTANTS_MEASURE"])
    coverage = Coverage(data_file=None, include=settings["targets"], config_file=False)
    coverage.start()
    process = os.getpid()

    def save() -> None:
        if os.getpid() != process:  # a fork, which measures nothing of its own
            return
        coverage.stop()
        data = coverage.get_data()
        lines = {file: data.lines(file) for file in data.measured_files()}
        handle, _ = tempfile.mkstemp(dir=settings["folder"], suffix=".json")
        with open(handle, "w") as file:
            json.dump({"test": os.environ["PYTEST_CURRENT_TEST"], "lines": lines}, file)

    atexit.register(save)
