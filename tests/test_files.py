"""Files that are written: whole or as before, with their permissions, through links."""

import io
import os
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest

from ostinato import _files
from ostinato.apps import files, session
from ostinato.apps.errors import UserError

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")


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


OPEN = [
    "/dev/fd/{0}",
    pytest.param("/proc/self/fd/{0}", marks=needs_proc),
    pytest.param("/proc/thread-self/fd/{0}", marks=needs_proc),
    pytest.param("/proc/{1}/fd/{0}", marks=needs_proc),
]


@pytest.fixture(params=OPEN)
def opened(request, tmp_path):
    """Yield a file with content, its number, and another path that leads to it."""
    path = tmp_path / "old"
    path.write_bytes(b"old ")
    number = os.open(path, os.O_WRONLY | os.O_APPEND)
    yield path, number, Path(request.param.format(number, os.getpid()))
    os.close(number)


@pytest.mark.parametrize("links", [0, 2])
def test_an_open_file_keeps_what_is_in_it(tmp_path, opened, links):
    path, number, target = opened
    for link in range(links):
        (tmp_path / f"link{link}").symlink_to(target)
        target = tmp_path / f"link{link}"
    before = sorted(os.listdir(tmp_path))
    files.write(target, b"new ")
    os.write(number, b"later")
    assert path.read_bytes() == b"old new later"
    assert sorted(os.listdir(tmp_path)) == before


PRINTING = """
import sys
from pathlib import Path
from ostinato.apps import files
print("before", file=sys.{0})
files.write(Path("/dev/{0}"), b"content\\n")
print("after", file=sys.{0})
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_file_that_is_redirected_to_keeps_the_order(tmp_path, stream):
    path, environment = tmp_path / "file", dict(os.environ)
    environment.pop("PYTHONUNBUFFERED", None)  # else nothing is held back
    with open(path, "wb") as file:
        file.write(b"old\n")
        file.flush()
        command = [sys.executable, "-c", PRINTING.format(stream)]
        subprocess.run(command, check=True, env=environment, **{stream: file})
        file.write(b"later\n")
    assert path.read_text().split() == ["old", "before", "content", "after", "later"]


def test_a_closed_output_is_not_what_has_its_number_now(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    program = "import os; os.open('file', os.O_WRONLY); from ostinato import _files; "
    program += "_files.write_atomically('/dev/stdout', b'content')"
    line = f'{sys.executable} -c "{program}" >&-'
    done = subprocess.run(line, shell=True, cwd=tmp_path, stderr=subprocess.PIPE)
    assert b"Bad file descriptor: '/dev/stdout'" in done.stderr
    assert (tmp_path / "file").read_bytes() == b"old"


def test_open_files_that_cannot_be_written_are_told(tmp_path):
    with pytest.raises(UserError, match="cannot write /dev/fd/9876: Bad file desc"):
        files.write(Path("/dev/fd/9876"), b"new")
    with pytest.raises(UserError, match="cannot write /dev/fd: Is a directory"):
        files.write(Path("/dev/fd"), b"new")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with open(path, "rb") as file:
        target = Path(f"/dev/fd/{file.fileno()}")
        with pytest.raises(UserError, match=f"write {target}: Bad file descriptor"):
            files.write(target, b"new")
    assert path.read_bytes() == b"old"


def test_streams_are_told_from_files(tmp_path, opened):
    path, _, target = opened
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "circle").symlink_to("circle")
    streams = target, tmp_path / "link", tmp_path / "pipe", os.devnull
    assert all(map(files.is_stream, streams))
    others = path, tmp_path, tmp_path / "none", tmp_path / "circle", tmp_path / "1"
    assert not any(map(files.is_stream, others))


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


def not_allowed(**_):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("exists, doing", [(True, "write in"), (False, "make")])
def test_a_folder_that_cannot_be_written_is_told_before_any_work(
    tmp_path, monkeypatch, exists, doing
):
    out = tmp_path if exists else tmp_path / "a" / "b"
    monkeypatch.setattr(tempfile, "TemporaryFile", not_allowed)
    with pytest.raises(
        UserError, match=f"cannot {doing} the folder {out}: Permission denied; choose"
    ):
        session.conduct(lambda: pytest.fail("work was done"), out, resume=False)
    assert not os.listdir(tmp_path)


@needs_proc
def test_a_folder_without_files_is_told():
    with pytest.raises(UserError, match="cannot make the folder /proc/none/run: "):
        files.check_folder(Path("/proc/none/run"))


def test_a_folder_is_checked_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", Path("."), Path("a/b")):
        files.check_folder(folder)
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="make the folder file/sub: file is no folder"):
        files.check_folder(Path("file/sub"))


def test_a_name_of_250_letters_is_written(tmp_path):
    path = tmp_path / ("é" * 125)
    _files.write_atomically(path, b"1")
    assert path.read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1
    left = tmp_path / f".{'é' * 100}.0123abcd{_files.PART}"
    left.write_bytes(b"")
    assert _files.unfinished(path) == [left]


@pytest.mark.parametrize("parts, fits", [(1, True), (3, False)])
def test_a_zip_file_may_hold_a_mebibyte_and_sixteen_times_its_size(parts, fits):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(parts):
            archive.writestr(str(i), bytes(2**19))
    size = len(content.getvalue())
    with zipfile.ZipFile(content) as archive:
        if fits:
            _files.check_zip(archive, size)
        else:
            with pytest.raises(ValueError, match="too large for a file of its size"):
                _files.check_zip(archive, size)
