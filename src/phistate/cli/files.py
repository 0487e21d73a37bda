"""Files a command writes: checked before the work, and there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def check_target(option: str, path: Path | None) -> None:
    """That a file can be written, before minutes are spent on what it is to hold.

    Raises:
        typer.BadParameter: it cannot.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(
            f"{option}: got {str(path)!r}; takes a file in a folder that exists and can be written"
        )


def write_whole(option: str, path: Path, content: str | bytes) -> None:
    """All of the file or none of it: written beside its place, then moved there.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        scratch.replace(path)
    except OSError as error:
        raise typer.BadParameter(f"{option}: got {str(path)!r}, which cannot be written ({error.strerror})") from None
    finally:
        scratch.unlink(missing_ok=True)
