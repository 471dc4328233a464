"""No code of ours loads pickles, evaluates text or starts a shell; looked up in the syntax tree of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autotune", "ppas_core", "reports", "search_spaces", "traces")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "code", "codeop"}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "pd.read_pickle", "np.load", "numpy.load", "torch.load", "subprocess.getoutput",
}  # fmt: skip


def dangers(source: str) -> list[str]:
    """What in `source` would run what it reads, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        if bad := RUNS_WHAT_IT_READS & set(names):
            found.append(f"{node.lineno}: imports {bad}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                found.append(f"{node.lineno}: {name}()")
            for keyword in node.keywords:
                on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                if keyword.arg in ("shell", "allow_pickle") and on:
                    found.append(f"{node.lineno}: {keyword.arg}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_runs_what_it_reads(package: str) -> None:
    modules = [path for path in MODULES if path.is_relative_to(ROOT / package)]
    assert modules
    assert [
        f"{path.relative_to(ROOT)}:{danger}" for path in modules for danger in dangers(path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=wanted)",
        "os.system(text)",
        "yaml.load(text, Loader)",
        "np.load(file, allow_pickle=True)",
    ],
)
def test_what_would_run_what_it_reads_is_seen(source: str) -> None:
    assert dangers(source)
    assert dangers("subprocess.run(words, shell=False)\npattern.compile(text)\nload_json(text)") == []
