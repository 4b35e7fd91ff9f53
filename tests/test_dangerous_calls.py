"""What may run foreign code or open a door stands in the source in named places only, each with its reason."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "rlhf_ray").rglob("*.py"))}

BANNED = {
    "eval", "exec", "compile", "__import__",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
    "dill.loads", "marshal.load", "marshal.loads", "shelve.open", "joblib.load",
    "torch.load", "np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "importlib.import_module", "runpy.run_path", "runpy.run_module",
}
ALLOWED = {
    ("checkpoint/state_files.py", "torch.load"): "with weights_only=True",
    ("checkpoint/state_files.py", "np.load"): "with allow_pickle=False",
    ("environments/host.py", "pickle.loads"): "of rows and replies, from the process that started it",
    ("user_code/frames.py", "pickle.loads"): "of requests, from the process that started it",
    ("user_code/keeper.py", "importlib.import_module"): "of our own module that its caller names",
    ("user_code/loading.py", "importlib.import_module"): "of the user's code, in its own process",
    ("user_code/sandbox_program.py", "exec"): "of a policy's program, inside of its sandbox",
    ("user_code/sandbox_program.py", "compile"): "of the same",
    ("environments/adapters/library.py", "importlib.import_module"): "of a library that a source names",
    ("environments/adapters/__init__.py", "importlib.import_module"): "of one of our own adapters",
    ("cluster/worker_template.py", "importlib.import_module"): "of libraries that the driver names",
    ("cluster/worker_template.py", "runpy.run_path"): "of the program that Ray starts, in its own process",
    ("__init__.py", "importlib.import_module"): "of one of our own public names",
    ("config/__init__.py", "importlib.import_module"): "of one of our own sections",
    ("config/given_objects.py", "compile"): "of a function's source, to read the names in it; it is not run there",
    ("stages/run_stage.py", "importlib.import_module"): "of one of our own stages",
    ("cli/examples.py", "importlib.import_module"): "of one of our own stages",
    ("stages/check_model.py", "importlib.import_module"): "of one of our own parts of the check",
    ("stages/submission_checks.py", "importlib.import_module"): "of one of our own stages",
}
SAFE = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}


def dotted(node: ast.AST) -> str:
    """"a.b.c" of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def calls(tree: ast.AST):
    """(name, call) of every call to a plain name, as its module would be named however it was imported."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.asname != "np"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            first, dot, rest = name.partition(".")
            yield aliases.get(first, first) + dot + rest, node


def place(path: Path) -> str:
    return path.relative_to(ROOT / "rlhf_ray").as_posix()


def test_what_may_run_foreign_code_is_called_in_named_places_only():
    found = {(place(path), name) for path, tree in SOURCES.items() for name, _ in calls(tree) if name in BANNED}
    assert found == set(ALLOWED)


def test_loaders_are_told_to_run_nothing():
    loads = [(name, ast.unparse(call)) for tree in SOURCES.values() for name, call in calls(tree) if name in SAFE]
    assert len(loads) == 2 and all(SAFE[name] in text for name, text in loads), loads


def test_no_command_goes_through_a_shell():
    shells = [f"{place(path)}:{call.lineno}" for path, tree in SOURCES.items() for _, call in calls(tree)
              if any(k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                     for k in call.keywords)]
    assert not shells


def test_models_are_read_with_the_trust_of_their_configuration():
    """transformers asks at the terminal about a model's code unless `trust_remote_code` is given."""
    loose = [f"{place(path)}:{call.lineno}" for path, tree in SOURCES.items() for name, call in calls(tree)
             if name.endswith("from_pretrained") and not any(k.arg is None for k in call.keywords)]
    # Files of our own making, and of generation_config.json, for which transformers knows no code.
    own = {"checkpoint/export.py", "data/tool_template.py", "roles/generator.py"}
    assert {text.split(":")[0] for text in loose} <= own


def test_nothing_listens_everywhere_or_opens_vllms_serialization():
    texts = [(place(path), node.value) for path, tree in SOURCES.items() for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [entry for entry in texts if entry[1] in ("0.0.0.0", "::")]
    named = [entry for entry in texts if "INSECURE_SERIALIZATION" in entry[1]]
    assert named == [("roles/engines/vllm_adapter.py", "VLLM_ALLOW_INSECURE_SERIALIZATION")]  # to refuse it
