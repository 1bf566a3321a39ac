import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from alight.errors import BadInput
from alight.files import GrowingArrays, read_arrays, write_rows, write_text, write_whole


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.txt"
    write_text(path, "old")

    def fails(file):
        file.write(b"half of the new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fails)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_ordinary_permissions(tmp_path):
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    assert write_text(tmp_path / "ours", "").stat().st_mode == ordinary.stat().st_mode


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_folder_is_refused_by_its_name(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path, "")
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(FileNotFoundError, match="empty name"):
        write_text("", "")


def test_a_device_is_written_to_not_replaced():
    write_text("/dev/null", "x")
    assert not pathlib.Path("/dev/null").is_file()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder") as caught:
        write_text(tmp_path / "missing" / "file", "")
    assert caught.value.filename == str(tmp_path / "missing")


def test_arrays_that_grew_are_read_as_one(tmp_path):
    path, rng = tmp_path / "rows.npz", np.random.default_rng(0)
    parts = [
        {"whole": rng.integers(9, size=(size, 2)), "half": rng.normal(size=(size, 3, 4)).astype(np.float16)}
        for size in (5, 1, 700)
    ]
    with GrowingArrays(path) as growing:
        for part in parts:
            growing.add(part)
        assert growing.write("Test", {"title": np.array("grown")}) == path
    assert [each.name for each in tmp_path.iterdir()] == ["rows.npz"]
    arrays = read_arrays(path, "Test")
    assert arrays.pop("title") == "grown"
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, np.concatenate([part[name] for part in parts]))
        assert values.dtype == parts[0][name].dtype
    assert {each.filename for each in zipfile.ZipFile(path).infolist() if each.compress_type} == {"whole.npy"}


def test_arrays_that_stop_growing_leave_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "rows.npz"
    path.write_text("old")

    def interrupted():
        with GrowingArrays(path) as growing:
            growing.add({"rows": np.zeros((5, 2))})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "rows", [{"rows": np.zeros((5, 3))}, {"rows": np.zeros((5, 2), np.float32)}, {"others": np.zeros((5, 2))}]
)
def test_rows_of_another_kind_are_refused(tmp_path, rows):
    with GrowingArrays(tmp_path / "rows.npz") as growing:
        growing.add({"rows": np.zeros((5, 2))})
        with pytest.raises(BadInput, match="give the same arrays each time"):
            growing.add(rows)


def test_a_full_disk_says_how_far_it_came_and_what_to_do():
    with GrowingArrays("/dev/full") as growing:
        growing.add({"rows": np.zeros((1000, 100))})
        with pytest.raises(OSError, match=r"after 1,000 rows \(0.8 MB\): free twice") as caught:
            growing.write("Test", {})
    assert caught.value.filename == "/dev/full"


GROWING = """
import resource, sys
import numpy as np
from alight.files import GrowingArrays

resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))  # as large as a file may get
with GrowingArrays(sys.argv[1]) as growing:
    while True:
        growing.add({"rows": np.zeros((1000, 10))})
"""


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(tmp_path):
    path = tmp_path / "rows.npz"
    ran = subprocess.run([sys.executable, "-c", GROWING, str(path)], capture_output=True, text=True)
    assert f"free twice the space of all rows, or write to another disk: '{path}'" in ran.stderr
    assert "after 12,000 rows" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_rows_are_written_as_csv_with_four_digits(tmp_path):
    write_rows(
        tmp_path / "rows.csv", [{"name": "a, b", "share": 1 / 3, "count": 2}, {"name": "c", "share": 1.0, "count": 3}]
    )
    assert (tmp_path / "rows.csv").read_text() == 'name,share,count\n"a, b",0.3333,2\nc,1.0000,3\n'
