"""What users install: wheel, sdist and editable install, each in an environment of its own, away from the checkout."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from subprocesses import check_output, run

ROOT = Path(__file__).parents[1]
_NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "venv")

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="these tests have no checkout around them"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: setuptools leaves its build folders behind."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "checkout", ignore=_NOT_SOURCE)


@pytest.fixture(scope="module")
def packages(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("packages")
    isolation = ["--no-isolation"] if _has_setuptools() else []
    command = [sys.executable, "-m", "build", *isolation, "--outdir", str(out), str(checkout)]
    check_output(command, timeout=300)
    return out


def _has_setuptools() -> bool:
    """Whether this environment can build the package itself."""
    if importlib.util.find_spec("setuptools") is None:
        return False
    from importlib.metadata import version

    return int(version("setuptools").split(".")[0]) >= 77


def _pip() -> list[str]:
    """A pip, which may be that of the Python this environment was made from."""
    for python in (sys.executable, getattr(sys, "_base_executable", sys.executable), "python3"):
        command = [python, "-m", "pip"]
        if subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no pip here to install with")


def _install(folder: Path, *arguments: str) -> Path:
    """A new environment's Python: it has this one's packages, and Expertile as installed with the arguments."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        ).strip()
    )
    # As a path only: this environment's own .pth files, such as that of an editable install, have no effect there.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    pip = [*_pip(), "--python", str(python), "install", "--quiet", "--no-deps"]
    check_output([*pip, "--disable-pip-version-check", *arguments], timeout=300)
    return python


@pytest.fixture(scope="module")
def installed(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel."""
    (wheel,) = packages.glob("*.whl")
    return _install(tmp_path_factory.mktemp("wheel") / "venv", "--no-index", str(wheel))


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with an editable install of the copy."""
    isolation = ["--no-build-isolation"] if _has_setuptools() else []
    folder = tmp_path_factory.mktemp("editable") / "venv"
    return _install(folder, *isolation, "--editable", str(checkout))


def _uses_the_package() -> dict[str, str]:
    """Import each room, compute a layer, and say where it all came from."""
    import importlib
    from importlib.metadata import version

    import torch

    import expertile

    modules = (
        "",
        ".codegen.isa.portable",
        ".templates.gates.silu",
        ".templates.formats",
        ".runtime",
    )
    found = {name: importlib.import_module("expertile" + name) for name in modules}
    x, ids = torch.ones(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    gate_up, down = torch.full((1, 64, 32), 1 / 32).bfloat16(), torch.full((1, 32, 32), 1 / 32)
    y = expertile.fused_experts(x, gate_up, down.bfloat16(), ids, torch.ones(2, 1))
    assert y.tolist() == [[0.73046875] * 32] * 2  # silu(1), which is 0.7311, in bf16
    assert version("expertile") == expertile.__version__
    return {
        name: module.__path__[0] for name, module in found.items() if hasattr(module, "__path__")
    }


def test_wheel_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    found = run(_uses_the_package, python=installed, cwd=tmp_path)
    for folder in found.values():
        assert Path(folder).is_relative_to(installed.parents[1])


def test_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    output = check_output([str(installed.parent / "expertile"), "--help"], cwd=tmp_path)
    assert "doctor" in output
    output = check_output([str(installed.parent / "expertile"), "cache", "info"], cwd=tmp_path)
    assert "cache" in output.lower()


def test_wheel_holds_the_package_and_nothing_else(packages: Path) -> None:
    (wheel,) = packages.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "expertile",
        wheel.name.rsplit("-", 3)[0] + ".dist-info",
    }
    assert "expertile/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {f"expertile/{name}" for name in _modules()}


def _modules() -> set[str]:
    """Every module of the sources, by its place under the package."""
    door = ROOT / "expertile"
    found = {str(path.relative_to(door)) for path in door.rglob("*.py")}
    for room in ("codegen", "templates", "runtime"):
        found |= {str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py")}
    return found


def test_sdist_holds_what_builds_it(packages: Path) -> None:
    (sdist,) = packages.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "expertile/py.typed"} <= names
    assert {"expertile/__init__.py", "codegen/compiler.py", "runtime/layer.py"} <= names


@pytest.mark.parametrize("where", [".", "codegen", "expertile", "elsewhere"])
def test_editable_install_works_from_anywhere(
    editable: Path, checkout: Path, tmp_path: Path, where: str
) -> None:
    folder = tmp_path if where == "elsewhere" else checkout / where
    found = run(_uses_the_package, python=editable, cwd=folder)
    for path in found.values():
        assert Path(path).is_relative_to(checkout)
