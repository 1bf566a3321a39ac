"""What is installed: light to import, complete, and at work in an empty environment."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import alight

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("code", ["import alight", "from alight import calibrate, HeadOutputs, Costs, replay, sweep"])
def test_importing_alight_imports_none_of_the_heavy_libraries(code):
    loaded = python(f"import sys\n{code}\nprint(' '.join(sys.modules))").split()
    heavy = {"torch", "torchvision", "timm", "transformers", "matplotlib", "plotly", "scipy", "tqdm"}
    assert "alight" in loaded
    assert not heavy & set(loaded)


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == alight.__version__
    assert alight.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_shipped_recordings_stay_small():
    sizes = [path.stat().st_size for path in (ROOT / "src/alight/recordings").glob("*.npz")]
    assert 0 < sum(sizes) <= 1_500_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this tree."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (path,) = place.glob("alight-*.whl")
    return path


def test_a_wheel_has_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if name.startswith("alight/")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT / "src", check=True, capture_output=True, text=True)
    assert packed == {name for name in tracked.stdout.splitlines() if (ROOT / "src" / name).exists()}


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_shows_what_it_can_and_says_what_is_missing(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    install = [scripts / "python", "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(install, check=True, capture_output=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([scripts / "alight", "demo"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, written, last = done.stdout.splitlines()
    missing = 'not live: torch, safetensors, scikit-learn missing: pip install "alight[torch,learn]"'
    assert last.endswith(missing)
    assert missing in done.stderr
    report = tmp_path / "alight-demo" / "report.html"
    assert written.endswith(str(report))
    assert report.stat().st_size > 100_000
    assert not (tmp_path / "alight-demo" / "digits").exists()
