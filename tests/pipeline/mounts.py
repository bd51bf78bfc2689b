"""Real file systems for tests: mounted in a namespace of their own, so they are gone when the test is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import TracebackType

import pytest


class SmallDisk:
    """A tmpfs of so many bytes; `path` leads into its namespace. Skips the test where the system lets nobody mount."""

    def __init__(self, mount_point: Path, size: int) -> None:
        """`mount_point` is an empty directory."""
        if shutil.which("unshare") is None:
            pytest.skip("needs unshare")
        self._mount_point = mount_point
        mount = f'mount -t tmpfs -o size={size} small "$1" && echo ready && read -r end'
        self._keeper = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(mount_point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"ready\n":
            self.close()
            pytest.skip("needs a kernel that lets users mount in their own namespace")
        self.path = Path(f"/proc/{self._keeper.pid}/root{mount_point}")

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def remount(self, options: str) -> None:
        """Change its options, such as `ro` or `size=2m`."""
        enter = ["nsenter", "--preserve-credentials", "--user", "--mount", "--target", str(self._keeper.pid)]
        subprocess.run([*enter, "mount", "-o", f"remount,{options}", str(self._mount_point)], check=True)

    def close(self) -> None:
        """End the namespace, and the file system with it; a second call does nothing."""
        self._keeper.communicate()
