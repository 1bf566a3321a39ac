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


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder") as caught:
        write_text(tmp_path / "missing" / "file", "")
    assert caught.value.filename == str(tmp_path / "missing")
