"""C sources of the lab, compiled at their first use."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from pulse_bpf.errors import HostError


def compiled(sources: Sequence[Path], cache: Path, command: Sequence[str], needs: str) -> Path:
    """What `command` makes of `sources`, kept in `cache` for as long as none of it changes.

    `sources` begin with the one to name it after and include headers; `command` is the compiler with options
    and libraries, `needs` the packages to install. HostError when compiling fails.
    """
    content = b"".join(source.read_bytes() for source in sources) + " ".join(command).encode()
    digest = hashlib.sha256(content).hexdigest()
    suffix = ".so" if "-shared" in command else ""
    product = cache / f"{sources[0].stem}-{digest[:16]}{suffix}"
    if product.exists():
        return product
    partial = product.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    what, install = (
        f"cannot compile the lab's {sources[0].name}",
        f"Install what it needs: apt-get install {needs}",
    )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Libraries come after the source that needs them.
        libraries = [part for part in command if part.startswith("-l")]
        options = [part for part in command if part not in libraries]
        subprocess.run(
            [
                *options,
                "-o",
                str(partial),
                *(str(each) for each in sources if each.suffix == ".c"),
                *libraries,
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        partial.rename(product)
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[-200:])
        raise HostError(what, reason, install) from error
    except OSError as error:
        raise HostError(what, str(error), install) from error
    finally:
        partial.unlink(missing_ok=True)
    return product
