"""Files that are written: whole or as before, with their permissions, through links."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from ostinato import _files
from ostinato.apps import files
from ostinato.apps.errors import UserError


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pipe_is_written_into(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    files.write(path, b"content")
    reader.join(10)
    assert got == [b"content"] and stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_standard_output_is_written_into():
    program = "from ostinato.apps import files; from pathlib import Path; "
    program += "files.write(Path('/dev/stdout'), b'content')"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True).stdout == b"content"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one(tmp_path, exists):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(target)
    files.write(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_permissions_are_those_of_the_old_file_or_of_the_umask(tmp_path, umask):
    path = tmp_path / "file"
    files.write(path, b"1")
    assert mode_of(path) == 0o666 & ~umask
    path.chmod(0o604)
    files.write(path, b"2")
    assert mode_of(path) == 0o604 and path.read_bytes() == b"2"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write(path, b"old")

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="cannot write .*file: No space left on device"):
        files.write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_folder_is_named_as_given(tmp_path):
    with pytest.raises(UserError, match=f"cannot write {tmp_path}: Is a directory"):
        files.write(tmp_path, b"")
    with pytest.raises(IsADirectoryError) as error:
        _files.write_atomically(tmp_path, b"")
    assert error.value.filename == str(tmp_path) and not os.listdir(tmp_path)


def test_a_folder_keeps_what_is_the_users(tmp_path):
    kept = [".mine.part", ".a.txt.part", ".a.txt.backup.part", ".b.txt.01234567.part"]
    for name in (*kept, ".a.txt.01234567.part"):
        (tmp_path / name).touch()
    files.make_folder(tmp_path, ["a.txt"])
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
