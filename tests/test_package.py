"""What is installed: light to import, complete, and at work in an empty environment."""

import json
import os
import subprocess
import sys
import sysconfig
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


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """An empty environment with nothing in it but a wheel of this tree and what that asks for."""
    place = tmp_path_factory.mktemp("elsewhere")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = place.glob("alight-*.whl")
    venv.create(place / "venv", with_pip=True)
    install = [scripts(place) / "python", "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return place


def scripts(place):
    return place / "venv" / ("Scripts" if os.name == "nt" else "bin")


def installed_demo(place, *options):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [scripts(place) / "alight", "demo", *options]
    return subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True)


def test_a_wheel_in_an_empty_environment_shows_what_it_can_and_says_what_is_missing(elsewhere):
    done = installed_demo(elsewhere)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    told = 'not live: torch, safetensors, scikit-learn missing: pip install "alight[torch,learn]"'
    assert first.endswith(told)
    assert told in done.stderr
    report = elsewhere / "alight-demo" / "report.html"
    assert last.endswith(str(report))
    assert report.stat().st_size > 100_000
    assert not (elsewhere / "alight-demo" / "digits").exists()


def test_a_wheel_beside_torch_runs_the_whole_demo_again_over_the_same_folder(elsewhere):
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    run = subprocess.run([scripts(elsewhere) / "python", "-c", code], check=True, capture_output=True, text=True)
    ours = Path(run.stdout.strip()) / "torch_and_more.pth"
    ours.write_text(sysconfig.get_path("purelib"))  # behind the wheel's own folder, so alight is the wheel's
    done = installed_demo(elsewhere, "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["missing"] == ""
    assert found["digits"]["spent"] < 0.55
    assert found["digits"]["plain"]["accuracy"] > 0.95
    assert Path(found["folder"]) == elsewhere / "alight-demo"
    assert '"name":"digits, live"' in Path(found["report"]).read_text()
    assert {path.name for path in (elsewhere / "alight-demo").iterdir()} == {"cifar100", "digits", "report.html"}
