"""What is installed: light to import, complete, and at work in an empty environment."""

import os
import subprocess
import sys
import tomllib
import venv
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


def test_the_version_is_told_once_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == alight.__version__
    assert alight.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_shipped_recordings_stay_small():
    sizes = [path.stat().st_size for path in (ROOT / "src/alight/recordings").glob("*.npz")]
    assert 0 < sum(sizes) <= 1_500_000


def test_a_wheel_installed_in_an_empty_environment_runs_the_demo(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("alight-*.whl")
    venv.create(tmp_path / "elsewhere", with_pip=True)
    scripts = tmp_path / "elsewhere" / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run([scripts / "python", "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([scripts / "alight", "demo"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "50%" in done.stdout
    report = tmp_path / "alight-demo" / "report.html"
    assert str(report) in done.stdout
    assert report.stat().st_size > 100_000
