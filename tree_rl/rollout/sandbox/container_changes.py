"""What an agent changed in a container: packed there as a tar, checked here, unpacked in another container.

The agent controlled its container, so the tar is untrusted: we check names, file types and sizes before we use it.
"""

import io
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Callable

from tree_rl.rollout.sandbox.files.trees import MAX_DEPTH, stays_inside

MAX_BYTES = 64 << 20
"""Largest size of an agent's changes, unpacked."""
MAX_FILES = 20_000
MARK = "TREE_RL_SANDBOX"
"""Environment variable that every command of a session gets. `KILL` finds the session's processes by it."""

KILL = """\
mark="MARK=$1" all= keep=" 1 $$ " pid=$$ tries=100
case "$(tr '\\0' ' ' </proc/1/cmdline)" in *swerex*) all=1 ;; esac
field() { while read -r key value rest; do [ "$key" != "$2" ] || { echo "$value"; return; }; done <"$1/status"; }
while [ "$pid" -gt 1 ]; do pid=$(field "/proc/$pid" PPid:); keep="$keep$pid "; done
while [ "$tries" -gt 0 ]; do
  found=
  for place in /proc/[0-9]*; do
    pid=${place#/proc/}
    case "$keep" in *" $pid "*) continue ;; esac
    [ "$all" ] || tr '\\0' '\\n' 2>/dev/null <"$place/environ" | grep -qxF "$mark" || continue
    [ "$(field "$place" State: 2>/dev/null)" != Z ] || continue
    kill -s KILL "$pid" 2>/dev/null && found=1
  done 2>/dev/null
  [ "$found" ] || exit 0
  tries=$((tries - 1)); sleep 0.05
done
exit 1
""".replace("MARK=", f"{MARK}=")
"""Shell script; argument: the session's mark. Kills all but the server where SWE-ReX's server is the container's first
process, and otherwise every process that has the mark in its environment."""

TAKE = """\
cd "$1" || exit 1
folder=$(mktemp -d) || exit 1
if [ "$2" ]; then
  export GIT_INDEX_FILE="$folder/index"
  g() { git -c safe.directory='*' -c core.fsmonitor= -c core.quotePath=false "$@"; }
  differing() { g diff --cached --no-renames --relative --name-only -z --diff-filter="$1" "$2"; }
  g read-tree "$2" && g add -A . && differing d "$2" >"$folder/names" && differing D "$2" >"$folder/gone" || exit 2
  tar --null -T "$folder/names" -czf "$folder/tar" || exit 2
else
  : >"$folder/gone"
  tar --exclude=./.git -czf "$folder/tar" . || exit 2
fi
echo "$folder"
"""
"""Shell script; arguments: directory, and the id of git's tree at the start (empty without a repository). Prints a
folder with `tar` (new and changed files) and `gone` (names of deleted files)."""
READ = 'tail -c "+$2" "$1" | head -c "$3" | base64 | tr -d "\\n"'
"""Shell script; arguments: file, first byte (counted from 1), number of bytes."""
PUT = """\
cd "$1" && base64 -d <"$2.gone" | xargs -0 -r rm -f -- && base64 -d <"$2.tar" | tar -xzf - --no-same-owner
status=$?
rm -f "$2.gone" "$2.tar"
exit "$status"
"""
"""Shell script; arguments: directory, and the path of two files without their suffixes `.gone` and `.tar`."""
TREE = 'cd "$1" && git -c safe.directory="*" rev-parse -q --verify "HEAD^{tree}" || true'
"""Shell script; argument: directory. Prints the id of git's tree, nothing without a repository."""


def checked_changes(packed: bytes, gone: bytes, *, leave_out: Callable[[str], bool]) -> tuple[bytes, list[str]]:
    """Keep the changes that may go into another container.

    Args:
        gone: names of deleted files, each ended by NUL.
        leave_out: returns True for a relative path to skip.

    Returns:
        A tar.gz of regular files, and links that stay inside; and the names of deleted files.

    Raises:
        ValueError: not a tar.gz, too many files or bytes, or a name that leads outside.
    """
    try:
        unpacker = zlib.decompressobj(wbits=31)
        plain = unpacker.decompress(packed, MAX_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"the agent's changes cannot be read: {error}") from error
    if len(plain) > MAX_BYTES:
        raise ValueError(f"the agent's changes exceed {MAX_BYTES} bytes")
    made = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as given,
            tarfile.open(fileobj=made, mode="w:gz") as kept,
        ):
            for number, member in enumerate(given):
                if number >= MAX_FILES:
                    raise ValueError(f"the agent changed more than {MAX_FILES} files")
                _keep(given, member, kept, leave_out)
    except (tarfile.TarError, EOFError, RecursionError, OverflowError) as error:
        raise ValueError(f"the agent's changes cannot be read: {error}") from error
    names = [relative(name) for name in gone.decode(errors="surrogateescape").split("\0") if name]
    return made.getvalue(), [name for name in names if not leave_out(name)]


def _keep(
    given: tarfile.TarFile, member: tarfile.TarInfo, kept: tarfile.TarFile, leave_out: Callable[[str], bool]
) -> None:
    name = relative(member.name)
    if name == "." or leave_out(name):
        return
    copy = tarfile.TarInfo(name)
    copy.mode = stat.S_IMODE(member.mode) & 0o755 | 0o600
    if member.isreg() and not member.issparse():
        copy.size = member.size
        kept.addfile(copy, given.extractfile(member))
    elif member.issym() and stays_inside(member.linkname, depth=name.count("/")):
        copy.type, copy.linkname = tarfile.SYMTYPE, member.linkname
        kept.addfile(copy)


def relative(name: str) -> str:
    """Normalize a path below the top. Raises `ValueError` if it leads outside or is too deep."""
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path == ".." or path.count("/") > MAX_DEPTH:
        raise ValueError(f"the agent's changes contain the name {name[:200]!r}; expected a path inside")
    return path
