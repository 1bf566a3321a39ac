import pathlib

import pytest

from alight.files import write_text, write_whole


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
